"""MessageQueue: what the requests of one actor have to report, on its way to the listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from actors.rollout.messages import Ended, MessageBatch
from cluster.records.partial_response import TokenChunk
from cluster.records.trajectory import TrajectoryGroup


class MessageQueue:
    """One stream for all requests of an actor: what is put while messages are on their way travels together in the
    next.

    It keeps everything until a listener comes.
    """

    def __init__(self) -> None:
        self._chunks: list[TokenChunk] = []
        self._ended: list[Ended] = []
        self._groups: list[TrajectoryGroup] = []
        self._has_messages = asyncio.Event()
        self._num_listeners = 0  # that have come so far; the newest one gets everything

    def put(self, chunks: Sequence[TokenChunk]) -> None:
        self._chunks += chunks
        self._has_messages.set()

    def end(self, ended: Ended, group: TrajectoryGroup | None = None) -> None:
        """A request is over; `group` is what came of it unless it failed."""
        assert (group is None) == (ended.error is not None), f"{ended.request_id}: a group or an error"
        self._ended.append(ended)
        if group is not None:
            self._groups.append(group)
        self._has_messages.set()

    async def messages(self) -> AsyncIterator[tuple[MessageBatch, list[TrajectoryGroup]]]:
        """What is put, in order, with the groups that follow the messages; it ends when another listener comes."""
        self._num_listeners += 1
        listener = self._num_listeners
        self._has_messages.set()  # who listened before learns that he is let go
        while True:
            while not (self._chunks or self._ended):
                self._has_messages.clear()
                await self._has_messages.wait()
                if listener != self._num_listeners:
                    return
            batch, groups = MessageBatch(self._chunks, self._ended), self._groups
            self._chunks, self._ended, self._groups = [], [], []
            yield batch, groups
