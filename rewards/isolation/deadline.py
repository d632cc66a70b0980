"""InTime: runs work of a model or engine in this process with a deadline, and counts threads that hang."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from mobula.cluster.runtime.concurrency import DaemonThread
from mobula.rewards.contract import TimedOutError

T = TypeVar("T")


class InTime:
    """Runs work in a thread, with `timeout_s` per response and a common `deadline` (`time.monotonic`).

    A thread cannot be killed. A late thread is abandoned and counted in `num_stuck` until it ends; the owner has to
    replace the process. Without timeout and deadline the work runs in the calling thread.

    Example:
        in_time = InTime(timeout_s=5)
        in_time.call(lambda: engine.read(image), "the OCR engine")
    """

    def __init__(self, *, timeout_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._thread: DaemonThread | None = None
        self._late: list[Future[Any]] = []
        self.deadline = math.inf

    @property
    def num_stuck(self) -> int:
        """Number of late threads that still run."""
        self._late = [future for future in self._late if not future.done()]
        return len(self._late)

    def call(self, work: Callable[[], T], what: str, num_responses: int = 1) -> T:
        """Returns the result of `work`, which scores `num_responses` responses. Errors of `work` are raised unchanged.

        Raises:
            TimedOutError: no result in time.
        """
        timeout_s = min(num_responses * self._timeout_s, self.deadline - time.monotonic())
        if timeout_s == math.inf:
            return work()
        if timeout_s <= 0:
            raise TimedOutError(f"no time was left for {what}")
        self._thread = self._thread or DaemonThread("reward-in-time")
        future = self._thread.submit(work)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if future.done():  # a TimeoutError of the work itself
                raise
            self._late.append(future)
            self._thread = None  # the next work gets a new thread
            raise TimedOutError(f"waited {timeout_s:.3g} s for {what}") from None
