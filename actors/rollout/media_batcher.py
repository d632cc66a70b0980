"""MediaBatcher: the pictures of all prompts that wait for theirs, read in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia


class MediaBatcher:
    """Reads media beside an event loop.

    A way to a thread and back, and a question to the object store, cost more than what they bring for one prompt. So
    while one read is under way, the prompts that come wait for the next, which is for all of them. What is not on this
    node yet is waited for by its own prompt alone.
    """

    def __init__(self, reader: MediaReader) -> None:
        self._reader = reader
        self._waiting: list[tuple[Sequence[MediaHandle], asyncio.Future[list[ProcessedMedia] | None]]] = []
        self._reading: asyncio.Task[None] | None = None

    async def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]:
        """The media of `handles`, in order; raises as `MediaReader.read` does."""
        if not handles:
            return []
        at_hand = asyncio.get_running_loop().create_future()
        self._waiting.append((handles, at_hand))
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_waiting(), name="read media")
        media = await at_hand
        return media if media is not None else await asyncio.to_thread(self._reader.read, handles)

    async def _read_waiting(self) -> None:
        """Serve until no call waits. A call that is not served reads for itself and gets its own error."""
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                found = await self._found([handles for handles, _ in waiting])
                for (_, at_hand), media in zip(waiting, found, strict=True):
                    if not at_hand.done():
                        at_hand.set_result(media)
        finally:
            self._reading = None

    async def _found(self, wanted: list[Sequence[MediaHandle]]) -> list[list[ProcessedMedia] | None]:
        try:
            return await asyncio.to_thread(self._reader.read_at_hand, wanted)
        except Exception:  # of which of them is not known here: it comes again where one reads for itself
            return [None] * len(wanted)
