"""Cores: the speed of simulated work on processors that several workers share."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol


class Work(Protocol):
    """Work whose speed depends on the other work on the same processors."""

    def settle(self) -> None:
        """Adds the progress up to now, at the speed until now."""
        ...

    def replan(self) -> None:
        """Sets the timer of the next event, at the new speed."""
        ...


class Cores:
    """Processors that divide their time equally among the threads that compute.

    Every thread has the speed `min(1, num_cores / threads)`. With an infinite number of cores no work waits.
    """

    def __init__(self, num_cores: float = math.inf) -> None:
        self.num_cores = num_cores
        self._num_threads = 0.0
        self._works: dict[Work, None] = {}

    @property
    def speed(self) -> float:
        return min(1.0, self.num_cores / self._num_threads) if self._num_threads > self.num_cores else 1.0

    def add(self, work: Work) -> None:
        """Calls `work` on each change of the speed."""
        self._works[work] = None

    def remove(self, work: Work) -> None:
        del self._works[work]

    def occupy(self, num_threads: float) -> None:
        """Changes the number of computing threads; negative when they end."""
        if math.isinf(self.num_cores):
            return
        for work in self._works:
            work.settle()
        self._num_threads += num_threads
        for work in list(self._works):
            work.replan()

    async def compute(self, seconds: float, num_threads: float = 1.0) -> None:
        """Waits for work that takes `seconds` on processors of its own."""
        if math.isinf(self.num_cores):
            await asyncio.sleep(seconds)
            return
        job = _Job(self, seconds)
        self.add(job)
        self.occupy(num_threads)
        try:
            await job.done
        finally:
            self.remove(job)
            self.occupy(-num_threads)


class _Job:
    """A fixed amount of work."""

    def __init__(self, cores: Cores, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._cores = cores
        self._left_s = seconds
        self._at_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def settle(self) -> None:
        now = self._loop.time()
        self._left_s -= (now - self._at_s) * self._cores.speed
        self._at_s = now

    def replan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, self._left_s) / self._cores.speed
        self._timer = self._loop.call_later(delay_s, self._end)

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
