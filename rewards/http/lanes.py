"""Lanes: a thread pool that scores for a server's event loop, with a bounded queue and a deadline per request."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from mobula.rewards.contract import Outcome, RewardRequest


class BatchScorer(Protocol):
    """Scores one batch at a time; each thread has its own. `is_stuck` is True while a hanging call blocks it."""

    is_stuck: bool

    def score(self, requests: Sequence[RewardRequest], deadline: float) -> Sequence[Outcome]:
        """Returns one outcome per request. Stops isolated calls at `deadline` (`time.monotonic`)."""
        ...

    def close(self) -> None: ...


class BusyError(Exception):
    """Every lane is busy and the queue is full."""


class _Lane:
    def __init__(self, scorer: BatchScorer) -> None:
        self.scorer = scorer
        self.busy_since: float | None = None


_Job = tuple["Future[Sequence[Outcome]]", Sequence[RewardRequest], float]


class Lanes:
    """Scores batches in one daemon thread (lane) per scorer. A lane that hangs stays busy until the process ends."""

    def __init__(self, scorers: Sequence[BatchScorer], *, max_waiting: int) -> None:
        self._lanes = [_Lane(scorer) for scorer in scorers]
        self._max_waiting = max_waiting
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"reward-lane-{number}", daemon=True)
            for number, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        return self._jobs.qsize()

    @property
    def num_busy(self) -> int:
        return sum(lane.busy_since is not None for lane in self._lanes)

    def num_stuck(self, seconds: float) -> int:
        """Returns the number of lanes that score one batch for longer than `seconds`, or whose scorer is stuck."""
        now = time.monotonic()
        starts = [(lane.scorer.is_stuck, lane.busy_since) for lane in self._lanes]
        return sum(is_stuck or (start is not None and now - start > seconds) for is_stuck, start in starts)

    def __len__(self) -> int:
        return len(self._lanes)

    def is_full(self) -> bool:
        return self.num_waiting >= self._max_waiting

    def submit(self, requests: Sequence[RewardRequest], deadline: float) -> Future[Sequence[Outcome]]:
        """Queues requests and returns the future of their outcomes. A future that is cancelled in time is not scored.

        Raises:
            BusyError: the queue is full.
        """
        if self.is_full():
            raise BusyError(f"{self.num_busy} lanes are busy and {self.num_waiting} requests wait")
        future: Future[Sequence[Outcome]] = Future()
        self._jobs.put((future, requests, deadline))
        return future

    def close(self, timeout_s: float) -> None:
        """Ends the lanes after the submitted requests, or at the timeout."""
        until = time.monotonic() + timeout_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for lane in self._lanes:
            lane.scorer.close()

    def _work(self, lane: _Lane) -> None:
        while (job := self._jobs.get()) is not None:
            future, requests, deadline = job
            if not future.set_running_or_notify_cancel():
                continue
            lane.busy_since = time.monotonic()
            try:
                future.set_result(lane.scorer.score(requests, deadline))
            except BaseException as error:  # raised in the waiting call
                future.set_exception(error)
            finally:
                lane.busy_since = None
