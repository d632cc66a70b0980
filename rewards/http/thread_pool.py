"""ScorerThreads: a thread pool that scores for a server, with a bounded queue and a deadline per request."""

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
    """Every thread is busy and the queue is full."""


class _Slot:
    def __init__(self, scorer: BatchScorer) -> None:
        self.scorer = scorer
        self.busy_since: float | None = None


_Job = tuple["Future[Sequence[Outcome]]", Sequence[RewardRequest], float]


class ScorerThreads:
    """Scores batches in one daemon thread per scorer. A thread that hangs stays busy until the process ends."""

    def __init__(self, scorers: Sequence[BatchScorer], *, max_waiting: int) -> None:
        self._slots = [_Slot(scorer) for scorer in scorers]
        self._max_waiting = max_waiting
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"reward-scorer-{number}", daemon=True)
            for number, slot in enumerate(self._slots)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        return self._jobs.qsize()

    @property
    def num_busy(self) -> int:
        return sum(slot.busy_since is not None for slot in self._slots)

    def num_stuck(self, seconds: float) -> int:
        """Returns the number of threads that score one batch for longer than `seconds`, or have a stuck scorer."""
        now = time.monotonic()
        starts = [(slot.scorer.is_stuck, slot.busy_since) for slot in self._slots]
        return sum(is_stuck or (start is not None and now - start > seconds) for is_stuck, start in starts)

    def __len__(self) -> int:
        return len(self._slots)

    def is_full(self) -> bool:
        return self.num_waiting >= self._max_waiting

    def submit(self, requests: Sequence[RewardRequest], deadline: float) -> Future[Sequence[Outcome]]:
        """Queues requests and returns the future of their outcomes. A future that is cancelled in time is not
        scored."""
        if self.is_full():
            raise BusyError(f"{self.num_busy} threads are busy and {self.num_waiting} requests wait")
        future: Future[Sequence[Outcome]] = Future()
        self._jobs.put((future, requests, deadline))
        return future

    def close(self, timeout_s: float) -> None:
        """Ends the threads after the submitted requests, or at the timeout."""
        until = time.monotonic() + timeout_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for slot in self._slots:
            slot.scorer.close()

    def _work(self, slot: _Slot) -> None:
        while (job := self._jobs.get()) is not None:
            future, requests, deadline = job
            if not future.set_running_or_notify_cancel():
                continue
            slot.busy_since = time.monotonic()
            try:
                future.set_result(slot.scorer.score(requests, deadline))
            except BaseException as error:  # raised in the waiting call
                future.set_exception(error)
            finally:
                slot.busy_since = None
