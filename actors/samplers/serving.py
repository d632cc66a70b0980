"""Serving state of an engine: weight version and number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ServedVersion:
    """The weight version of new requests; -1 before the first push."""

    def __init__(self) -> None:
        self.number = -1
        self._changed = asyncio.Event()

    def set(self, number: int) -> None:
        self.number = number
        self._changed.set()
        self._changed = asyncio.Event()

    async def reach(self, number: int) -> None:
        """Waits for version `number` or newer, without a deadline."""
        while self.number < number:
            await self._changed.wait()


class RunningRequests:
    """Counts the requests in flight of an engine."""

    def __init__(self) -> None:
        self._num = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts one request while the body runs."""
        self._num += 1
        self._none.clear()
        try:
            yield
        finally:
            self._num -= 1
            if self._num == 0:
                self._none.set()

    async def ended(self) -> None:
        """Waits until no request is in flight, without a deadline."""
        await self._none.wait()

    async def drained(self, timeout_s: float) -> None:
        """Waits until no request is in flight, at most `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), timeout_s)
