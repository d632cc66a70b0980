"""ChunkListener: the token chunks of one rollout actor, each to whoever waits for that prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cluster.errors import WorkerDiedError
from cluster.ray_group import items
from cluster.sampled import TokenChunk

Take = Callable[[TokenChunk], None]

BATCHES_A_STREAM = 1000  # Ray keeps about 100 bytes for each value of a stream until the stream ends


class ChunkListener:
    """One stream for all prompts of an actor; it is opened with the first one that may have chunks."""

    def __init__(self, handle: Any, name: str) -> None:
        """`handle` is the Ray handle of a `RolloutActor` named `name`."""
        self._handle = handle
        self._name = name
        self._takers: dict[str, Take] = {}  # by request id
        self._listening: asyncio.Task[None] | None = None

    @contextmanager
    def heard(self, request_id: str, take: Take) -> Iterator[None]:
        """Give `take` the chunks of one request while the body runs; chunks that come later are dropped.

        Raises:
            Exception: why the stream broke off before, if the actor did not die.
        """
        self._open()
        self._takers[request_id] = take
        try:
            yield
        finally:
            del self._takers[request_id]

    async def drain(self, timeout_s: float) -> None:
        """Take what an actor that died had sent; `timeout_s` at most, for it may not be known yet that it died."""
        if self._listening is not None:
            await asyncio.wait({self._listening}, timeout=timeout_s)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()

    def _open(self) -> None:
        if self._listening is not None and self._listening.done() and not self._listening.cancelled():
            self._listening.result()
        if self._listening is None or self._listening.done():
            stream = self._stream()  # asked for before the request that reports
            self._listening = asyncio.create_task(self._listen(stream), name=f"listen to {self._name}")

    def _stream(self) -> Any:
        return self._handle.chunks.options(num_returns="streaming").remote(BATCHES_A_STREAM)

    async def _listen(self, stream: Any) -> None:
        try:
            while await self._take_all(stream) == BATCHES_A_STREAM:
                stream = self._stream()
        except WorkerDiedError:
            pass  # everybody who waits for a group of it is told so as well

    async def _take_all(self, stream: Any) -> int:
        """Hand out every chunk of one stream; how many batches there were."""
        num_batches = 0
        async for batch in items(stream, what=f"chunks of {self._name}"):
            num_batches += 1
            for chunk in batch:
                if chunk.request_id in self._takers:
                    self._takers[chunk.request_id](chunk)
        return num_batches
