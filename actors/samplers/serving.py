"""Serving state of an engine: weight version and number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ServedVersion:
    """The version that samples new requests; -1 before the first push."""

    def __init__(self) -> None:
        self.number = -1
        self._changed = asyncio.Event()

    def set(self, number: int) -> None:
        self.number = number
        self._changed.set()
        self._changed = asyncio.Event()

    async def reach(self, number: int) -> None:
        """Wait for a version that is not older. The caller has the deadline."""
        while self.number < number:
            await self._changed.wait()


class RunningRequests:
    """How many requests an engine has at the moment."""

    def __init__(self) -> None:
        self._num = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """A request, while the body runs."""
        self._num += 1
        self._none.clear()
        try:
            yield
        finally:
            self._num -= 1
            if self._num == 0:
                self._none.set()

    async def drained(self, timeout_s: float) -> None:
        """Wait until there is none, or `timeout_s` is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), timeout_s)
