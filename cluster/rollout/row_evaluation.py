"""RowEvaluator: held-out rows of an offline job, assessed by the learner itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import Reference
from mobula.cluster.rollout.evaluation import EvaluationSchedule


class Assessor(Protocol):
    """The learner of an offline job."""

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """The job's metrics on these rows, with the weights as they are."""
        ...


class RowEvaluator:
    """Implements `HeldOutEvaluator` and `Resumable`.

    An assessment is a forward pass of the learner, so `maybe_run` waits for it. The rows are scored by the reference
    once: it is frozen.
    """

    def __init__(
        self,
        *,
        rows: Sequence[ScoredGroup],
        learner: Assessor,
        reference: Reference,
        schedule: EvaluationSchedule,
        on_result: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        """`on_result` is called with the version and the metrics of each assessment."""
        self.results: dict[int, dict[str, float]] = {}
        self._rows = rows
        self._is_scored = False
        self._learner = learner
        self._reference = reference
        self._schedule = schedule
        self._on_result = on_result

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """Nothing runs beside the body."""
        yield

    async def maybe_run(self, version: int) -> None:
        """Assess `version`, which the learner holds, if it is due and was not assessed yet."""
        if not self._schedule.is_due(version) or version in self.results:
            return
        if not self._is_scored:
            self._rows, self._is_scored = await self._reference.score(self._rows), True
        self.results[version] = dict(await self._learner.assess(self._rows))
        self._on_result(version, self.results[version])

    async def finish(self) -> None:
        """Nothing is under way."""

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        return {"results": [[version, metrics] for version, metrics in self.results.items()]}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Know the results of an earlier part of this run."""
        self.results = dict(state["results"])
