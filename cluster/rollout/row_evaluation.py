"""RowEvaluator: evaluates the held-out rows of an offline job with the learner."""

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
        """Returns the job's metrics on these rows with the current weights."""
        ...


class RowEvaluator:
    """Implements `HeldOutEvaluator` and `Resumable`.

    An evaluation is a forward pass of the learner, so `maybe_run` waits for it. The frozen reference scores the rows
    once.
    """

    def __init__(
        self,
        *,
        rows: Sequence[ScoredGroup],
        learner: Assessor,
        reference: Reference,
        schedule: EvaluationSchedule,
        on_result: Callable[[int, Mapping[str, float]], None],
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        """`on_result` gets the version and the metrics of each evaluation; `identity` names what is evaluated."""
        self._identity = dict(identity or {})
        self.results: dict[int, dict[str, float]] = {}
        self._rows = rows
        self._is_scored = False
        self._learner = learner
        self._reference = reference
        self._schedule = schedule
        self._on_result = on_result

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """Does nothing: `maybe_run` evaluates in the foreground."""
        yield

    async def maybe_run(self, version: int) -> None:
        """Evaluates `version`, which the learner holds, if that is due and not done."""
        if not self._schedule.is_due(version) or version in self.results:
            return
        if not self._is_scored:
            self._rows, self._is_scored = await self._reference.score(self._rows), True
        self.results[version] = dict(await self._learner.assess(self._rows))
        self._on_result(version, self.results[version])

    async def finish(self) -> None:
        """Does nothing: no evaluation runs in the background."""

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        results = [[version, metrics] for version, metrics in self.results.items()]
        return {"identity": self._identity, "results": results}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Restores the results of an earlier part of the run; results of another evaluation do not count."""
        is_same = state.get("identity", self._identity) == self._identity
        self.results = dict(state["results"]) if is_same else {}
