"""Streams of rows to offline jobs and to the supervised term."""

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
        """Returns the next rows, scored. They count as sampled by the version that trains on them."""
        reading = self._ahead or self._read(num_groups)
        groups, self._cursor = await reading
        self._version += 1
        self._ahead = self._read(num_groups) if self._version < self._total_steps else None
        return groups

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        """Does nothing: rows occupy no buffer."""

    async def stats(self) -> ReplayStats:
        return ReplayStats()

    def state(self) -> dict[str, Any]:
        return {"cursor": self._cursor}

    def restore(self, version: int, state: dict[str, Any]) -> None:
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


class SupervisedRows:
    """Implements `Resumable`: the row indices of a step depend only on the version that it makes.

    So a step that is repeated after a fault, or by the journal, trains the same rows. The rows of the next step are
    read on a thread while the learner trains.
    """

    def __init__(self, source: RowSource, put: Callable[[Any], Any], *, rows_per_step: int, total_steps: int) -> None:
        """`put` stores a group and returns a reference for `mobula.cluster.runtime.object_store.fetch`."""
        self._source = source
        self._put = put
        self._rows_per_step = rows_per_step
        self._total_steps = total_steps
        self._starts = {1: 0}  # version made -> cursor of its first row in the source
        self._furthest = 0  # highest version whose rows were requested
        self._ahead: tuple[int, asyncio.Task[list[ScoredGroup]]] | None = None

    async def of(self, version: int) -> Sequence[ScoredGroup]:
        """Returns the rows of the step that makes `version`. Steps come in order; earlier steps may be repeated."""
        rows = await self._taken(version)
        self._furthest = max(self._furthest, version)
        if version < self._total_steps:
            self._ahead = (version + 1, asyncio.create_task(self._read(version + 1), name="read supervised rows"))
        return rows

    def state(self) -> dict[str, Any]:
        return {"cursor": self._starts[self._furthest + 1]}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        self._starts, self._furthest, self._ahead = {version + 1: state["cursor"]}, version, None

    async def _taken(self, version: int) -> list[ScoredGroup]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            rows = await ahead[1]  # also if these rows are not needed: the source has one reader at a time
            if ahead[0] == version:
                return rows
        return await self._read(version)

    async def _read(self, version: int) -> list[ScoredGroup]:
        return await asyncio.to_thread(self._step, version)

    def _step(self, version: int) -> list[ScoredGroup]:
        if self._source.cursor != self._starts[version]:
            self._source.restore(self._starts[version], ())
        rows = [stored(self._source.next(), version - 1, self._put) for _ in range(self._rows_per_step)]
        self._starts[version + 1] = self._source.cursor
        return rows
