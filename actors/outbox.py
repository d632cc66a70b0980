"""Outbox: what the prompts of one actor have to report, on its way to whoever listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cluster.sampled import TokenChunk


class Outbox:
    """One stream for all prompts of an actor: what is put while a batch is on its way travels together in the next one.

    The newest listener gets everything; one that came before it is let go. Without a listener nothing is kept.
    """

    def __init__(self) -> None:
        self._listener: _Listener | None = None

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        if self._listener is not None:
            self._listener.put(chunks)

    async def batches(self) -> AsyncIterator[list[TokenChunk]]:
        """Everything that is put from now on, in order, until another listener comes."""
        if self._listener is not None:
            self._listener.let_go()
        listener = self._listener = _Listener()
        while batch := await listener.take():
            yield batch


class _Listener:
    def __init__(self) -> None:
        self._waiting: list[TokenChunk] = []
        self._is_let_go = False
        self._has_news = asyncio.Event()

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        self._waiting.extend(chunks)
        self._has_news.set()

    def let_go(self) -> None:
        self._is_let_go = True
        self._has_news.set()

    async def take(self) -> list[TokenChunk]:
        """Everything since the last call, as soon as there is something; nothing once the listener was let go."""
        await self._has_news.wait()
        self._has_news.clear()
        if self._is_let_go:
            return []
        taken, self._waiting = self._waiting, []
        return taken
