"""OfflineLearner: one rank of the group that trains on rows of a data set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from cluster.records.trajectory import ScoredGroup
from cluster.roles import UpdateReport
from configs.schema import RunConfig
from learner.learner import Learner
from learner.meter import Meter
from learner.offline.examples import Example, ExampleTotals, collate_examples, fetch_examples, totals_of
from learner.offline.objectives import build_objective
from learner.optim import learning_rate
from learner.profiling import profiled


class OfflineLearner(Learner):
    """A learner rank whose step is one of `offline.job`: backends, optimizer, checkpoints and export are the learner's.

    Both methods here are collective; every rank is given all groups and takes its share.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int, banned_ids: tuple[int, ...]) -> None:
        super().__init__(config, rank, world_size, banned_ids)
        self._offline_objective = build_objective(config.offline)

    @profiled
    def update(self, groups: Sequence[ScoredGroup], version: int) -> UpdateReport:
        """One optimizer step on these rows, which makes `version`; with no token to learn from it is skipped."""
        examples = self._examples(groups)
        totals, meter = totals_of(examples), Meter()
        rate = learning_rate(self._config.learner, version - 1, self._config.num_steps)
        is_taken, metrics = False, {"loss": 0.0, "grad_norm": 0.0}
        if totals.num_tokens > 0:
            grad_norm = self._optimized(examples, partial(self._part, totals, meter), rate)
            is_taken, metrics = math.isfinite(grad_norm), {**meter.reduce(), "grad_norm": grad_norm}
        self.version = version
        counts = {"skipped": float(not is_taken), "optimizer_steps": float(is_taken)}
        return UpdateReport(version, {**metrics, "learning_rate": rate, **counts})

    def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """The job's metrics on these rows, with the weights as they are."""
        examples = self._examples(groups)
        totals, meter = totals_of(examples), Meter()
        with self._backend.inference():
            for rows in self._step.shares(examples):
                self._part(totals, meter, rows)
        return meter.reduce()

    def _examples(self, groups: Sequence[ScoredGroup]) -> list[Example]:
        return fetch_examples(groups, self._offline_objective.row, self._config.timeouts.object_s)

    def _part(self, totals: ExampleTotals, meter: Meter, rows: Sequence[Example]) -> Tensor:
        batch = collate_examples(rows, self._reader, self._device)
        return self._offline_objective(self._policy, batch, totals, meter)
