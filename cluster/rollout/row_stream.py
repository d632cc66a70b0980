"""RowStream: replaces rollouts and replay buffer by the rows of a data set, for offline jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from mobula.cluster.records.trajectory import ScoredGroup, WeightSpan
from mobula.cluster.roles import Reference, ReplayStats

# A small row travels by value with the step's rows: to store and fetch an object of its own takes about 2 ms.
SMALL_BYTES = 32 * 1024
NO_QUEUE = ReplayStats(num_ready=0, num_taken=0, num_bytes=0, oldest_age_s=0.0)


class RowSource(Protocol):
    """An endless stream of rows as groups (`mobula.actors.datasets.prompts.PromptSource`)."""

    @property
    def cursor(self) -> int: ...

    def next(self) -> ScoredGroup: ...

    def restore(self, cursor: int, pending: Sequence[str]) -> None: ...


class RowStream:
    """Implements `GroupProducer`, `GroupQueue` and `Resumable`: a step takes the next rows of the source.

    The rows of the next step are read on a thread, and scored by the reference, while the learner trains. A checkpoint
    stores the cursor after the rows of the taken steps, so a resumed run takes the same rows.
    """

    def __init__(self, source: RowSource, put: Callable[[Any], Any], reference: Reference, *, total_steps: int) -> None:
        """`put` stores a group and returns a reference for `mobula.cluster.runtime.object_store.fetch`."""
        self._source = source
        self._put = put
        self._reference = reference
        self._total_steps = total_steps
        self._version = 0  # from which the next step trains
        self._cursor = 0
        self._ahead: asyncio.Task[tuple[list[ScoredGroup], int]] | None = None

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Samples nothing. Cancels a read in progress on exit."""
        try:
            yield
        finally:
            if self._ahead is not None:
                self._ahead.cancel()

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        """Returns the next rows, scored. They count as sampled by the version that trains on them.

        Raises:
            DatasetError: no row of the data set is usable.
            WorkerDiedError, DeadlineError, LostReplyError: the reference did not score them.
        """
        reading = self._ahead or self._read(num_groups)
        groups, self._cursor = await reading
        self._version += 1
        self._ahead = self._read(num_groups) if self._version < self._total_steps else None
        return groups

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        """Does nothing: rows occupy no buffer."""

    async def stats(self) -> ReplayStats:
        return NO_QUEUE

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {"cursor": self._cursor}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Continues after the rows of `version`."""
        self._version, self._cursor = version, state["cursor"]
        self._source.restore(self._cursor, ())

    def _read(self, num_groups: int) -> asyncio.Task[tuple[list[ScoredGroup], int]]:
        return asyncio.create_task(self._scored(num_groups, self._version), name="read rows")

    async def _scored(self, num_groups: int, version: int) -> tuple[list[ScoredGroup], int]:
        groups, cursor = await asyncio.to_thread(self._step, num_groups, version)
        return await self._reference.score(groups), cursor

    def _step(self, num_groups: int, version: int) -> tuple[list[ScoredGroup], int]:
        groups = [stored(self._source.next(), version, self._put) for _ in range(num_groups)]
        return groups, self._source.cursor


def stored(row: ScoredGroup, version: int, put: Callable[[Any], Any]) -> ScoredGroup:
    """Stores the group of a row, unless it is small. No policy sampled it, so it is marked as sampled by `version` and
    never over-age."""
    trajectories = tuple(
        replace(t, weight_spans=(WeightSpan(version, 0, t.num_steps),)) for t in row.group.trajectories
    )
    group = replace(row.group, trajectories=trajectories)
    summary = group.summary()
    return replace(row, summary=summary, group=group if summary.num_bytes <= SMALL_BYTES else put(group))
