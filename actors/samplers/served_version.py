"""The version of the weights that an engine serves; requests that need a newer version wait for it."""

from __future__ import annotations

import asyncio


class ServedVersion:
    """The version that samples what reaches the engine now; -1 before the first push."""

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
