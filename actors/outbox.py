"""Outbox: what the prompts of one actor have to report, on its way to whoever listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cluster.sampled import TokenChunk


class Outbox:
    """One stream for all prompts of an actor: what is put while a batch is on its way travels together in the next one.

    It keeps nothing until somebody has listened once, and from then on everything until somebody listens again.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenChunk] = []
        self._has_news = asyncio.Event()
        self._num_listeners = 0  # that have come so far; the newest one gets everything

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        if self._num_listeners:
            self._waiting.extend(chunks)
            self._has_news.set()

    async def batches(self, num_batches: int) -> AsyncIterator[list[TokenChunk]]:
        """What is put, in order, in `num_batches` batches; it ends before them when another listener comes."""
        self._num_listeners += 1
        listener = self._num_listeners
        self._has_news.set()  # who listened before learns that he is let go
        for _ in range(num_batches):
            while not self._waiting:
                self._has_news.clear()
                await self._has_news.wait()
                if listener != self._num_listeners:
                    return
            batch, self._waiting = self._waiting, []
            yield batch
