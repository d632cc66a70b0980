"""MediaBatcher: who waits at a moment is read for in one go; what is late or broken is its own prompt's matter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mobula.actors.rollout.actor import MediaBatcher
from mobula.cluster.errors import LostObjectError
from mobula.cluster.records.media import MediaHandle, ProcessedMedia

PATIENCE_S = 30.0


class Reader:
    """A `MediaReader` that has everything at hand but `late`, and fails with what is `lost`."""

    def __init__(self, *, late: str = "", lost: str = "", before: Callable[[], object] = lambda: None) -> None:
        self.together: list[int] = []  # how many were read for in one go
        self.alone: list[str] = []
        self._late = late
        self._lost = lost
        self._before = before

    def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]:
        self.alone.append(handles[0].key)
        if handles[0].key == self._lost:
            raise LostObjectError("the node that held it is gone")
        return [handle.reference for handle in handles]

    def read_at_hand(self, wanted: Sequence[Sequence[MediaHandle]]) -> list[list[ProcessedMedia] | None]:
        self.together.append(len(wanted))
        self._before()
        keys = [handles[0].key for handles in wanted]
        if self._lost in keys:
            raise LostObjectError("some node is gone")
        return [
            None if key == self._late else [h.reference for h in own] for key, own in zip(keys, wanted, strict=True)
        ]


def image(key: str) -> tuple[MediaHandle, ...]:
    media = ProcessedMedia("image", {"pixel_values": np.zeros(1, np.float32)})
    return (MediaHandle(key, "image", media.num_bytes, media, key),)


async def read(reads: MediaBatcher, *keys: str) -> list[list[ProcessedMedia] | BaseException]:
    images = [image(key) for key in keys]
    found = await asyncio.wait_for(asyncio.gather(*map(reads.read, images), return_exceptions=True), timeout=PATIENCE_S)
    for own, media in zip(images, found, strict=True):
        assert isinstance(media, BaseException) or media == [own[0].reference]
    return found


async def test_those_that_come_together_are_read_for_together() -> None:
    reader = Reader()
    await read(MediaBatcher(reader), "a", "b", "c")
    assert (reader.together, reader.alone) == ([3], [])


async def test_those_that_come_during_a_read_share_the_next() -> None:
    is_reading, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        assert goes_on.wait(PATIENCE_S)

    reader = Reader(before=wait)
    reads = MediaBatcher(reader)
    first = asyncio.create_task(read(reads, "a"))
    assert await asyncio.to_thread(is_reading.wait, PATIENCE_S)
    others = [asyncio.create_task(read(reads, key)) for key in "bcd"]
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(first, *others)
    await read(reads, "e")
    assert (reader.together, reader.alone) == ([1, 3, 1], [])


async def test_what_is_not_here_yet_is_waited_for_alone() -> None:
    reader = Reader(late="b")
    await read(MediaBatcher(reader), "a", "b", "c")
    assert (reader.together, reader.alone) == ([3], ["b"])


async def test_a_loss_reaches_its_own_caller_alone_and_the_next_are_read_together_again() -> None:
    reader = Reader(lost="b")
    reads = MediaBatcher(reader)
    a, b, c = await read(reads, "a", "b", "c")
    assert isinstance(b, LostObjectError) and isinstance(a, list) and isinstance(c, list)
    await read(reads, "d", "e")
    assert (reader.together, sorted(reader.alone)) == ([3, 2], ["a", "b", "c"])


async def test_one_who_gave_up_does_not_hold_up_the_others() -> None:
    reader = Reader()
    reads = MediaBatcher(reader)
    gone = asyncio.create_task(reads.read(image("a")))
    await asyncio.sleep(0)
    gone.cancel()
    await read(reads, "b")
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_a_prompt_without_images_reads_nothing() -> None:
    reader = Reader()
    assert await MediaBatcher(reader).read(()) == []
    assert reader.together == []
