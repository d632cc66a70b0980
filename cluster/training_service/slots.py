"""Slots: limits the work in flight, first in, first out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """At most `num_slots` units of work in flight. A call of more units takes all slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_free = num_slots
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, num_units: int) -> AsyncIterator[None]:
        """Holds slots while the body runs. Waits without a deadline: each earlier call has one."""
        num = min(num_units, self._num_slots)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back(num)
            else:
                self._waiting.remove((num, granted))
                self._grant()
            raise
        try:
            yield
        finally:
            self._give_back(num)

    def _give_back(self, num: int) -> None:
        self._num_free += num
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_free:
            num, granted = self._waiting.popleft()
            self._num_free -= num
            granted.set_result(None)
