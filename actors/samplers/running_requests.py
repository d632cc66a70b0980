"""Counts the requests that an engine samples, so that a weight push can wait until they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
