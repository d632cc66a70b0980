"""Work in this process that may hang, a model's or an engine's: it has a deadline, and what hangs on is known."""

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
    """Runs work in a thread, each response with `timeout_s`, all of it until `deadline` (on `time.monotonic`'s clock).

    A thread cannot be ended. One that is late is left behind, and `num_stuck` counts those that are still at it:
    the owner of the process has to replace it. Without a timeout and a deadline everything happens in the thread that
    asks.

    Example:
        in_time = InTime(timeout_s=5)
        in_time.call(lambda: engine.read(picture), "the OCR engine")
    """

    def __init__(self, *, timeout_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._thread: DaemonThread | None = None
        self._late: list[Future[Any]] = []
        self.deadline = math.inf

    @property
    def num_stuck(self) -> int:
        """Threads that were late and have not come back since."""
        self._late = [future for future in self._late if not future.done()]
        return len(self._late)

    def call(self, work: Callable[[], T], what: str, num_responses: int = 1) -> T:
        """The result of `work`, which scores `num_responses` responses; what it raises travels as it is.

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
            if future.done():  # it is what the work itself raised
                raise
            self._late.append(future)
            self._thread = None  # the next work gets another one
            raise TimedOutError(f"waited {timeout_s:.3g} s for {what}") from None
