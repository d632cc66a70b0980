"""SupervisedRows: rows of a data set that RL steps train in addition to their groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.rollout.row_stream import RowSource, stored


class SupervisedRows:
    """Implements `Resumable`: the row indices of a step depend only on the version that it makes.

    So a step that is repeated after a fault, or by the journal, trains the same rows. The rows of the next step are
    read on a thread while the learner trains.

    Example:
        rows = SupervisedRows(source, ray.put, rows_per_step=32, total_steps=100)
        extra_rows = await rows.of(version=1)
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
        """Returns the rows of the step that makes `version`. Steps come in order; earlier steps may be repeated.

        Raises:
            DatasetError: no row of the data set is usable.
        """
        rows = await self._taken(version)
        self._furthest = max(self._furthest, version)
        if version < self._total_steps:
            self._ahead = (version + 1, asyncio.create_task(self._read(version + 1), name="read supervised rows"))
        return rows

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {"cursor": self._starts[self._furthest + 1]}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Continues after the rows of `version`."""
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
