"""Hosts without processes: they make workers in this process, count places, and fail when a test asks for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from mobula.cluster.workers.status import RestartPolicy

AT_ONCE = RestartPolicy(max_restarts=3, window_s=1000, backoff_s=0, max_backoff_s=0)


class FakeHosts:
    """Implements `mobula.cluster.workers.work_queue.Hosts`. `start(index)` is what makes a worker; it may raise."""

    def __init__(self, start: Callable[[int], Any], *, booked: int = 0) -> None:
        """Places 0 to `booked` - 1 are taken by the first workers."""
        self._start = start
        self.booked = set(range(booked))
        self.started: Counter[int] = Counter()
        self.stopped: list[tuple[int, Any]] = []

    async def start(self, index: int) -> Any:
        await asyncio.sleep(0)
        self.booked.add(index)
        self.started[index] += 1
        return self._start(index)

    async def stop(self, index: int, handle: Any) -> None:
        await asyncio.sleep(0)
        self.stopped.append((index, handle))

    async def release(self, index: int) -> None:
        await asyncio.sleep(0)
        self.booked.discard(index)


async def settle() -> None:
    """Let everything that can go on without waiting for another task go on."""
    for _ in range(50):
        await asyncio.sleep(0)
