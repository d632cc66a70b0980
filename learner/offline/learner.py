"""OfflineLearner: one rank of the group that trains on rows of a dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.learner.backends.sharded import ShardedWriter
from mobula.learner.examples.entries import DataRows
from mobula.learner.examples.examples import (
    Example,
    ExampleBatch,
    ExampleTotals,
    SharedExample,
    all_whole,
    collate_examples,
    totals_of,
)
from mobula.learner.gradient_step import Term
from mobula.learner.learner import Learner
from mobula.learner.meter import Meter
from mobula.learner.offline.objectives import build_objective
from mobula.learner.optim import learning_rate
from mobula.learner.optim.slow import NullSlow, SlowWeights
from mobula.learner.policies.adapters import without_adapters
from mobula.learner.policies.logprobs import PLAIN
from mobula.learner.shares import Portion


class OfflineLearner(Learner):
    """A learner rank that runs the steps of `offline.job`. Backends, optimizer, checkpoints and export are those of
    `Learner`.

    `update` and `assess` are collective. A rank gets references to all groups, or outlines and its own `portion`, and
    fetches its share.
    """

    def connect(self, init_method: str) -> None:
        """Connects as a learner does; a flow model keeps its initial weights as the reference."""
        super().connect(init_method)
        self._offline_objective = build_objective(self._config, self._scoring.canary)
        compares = self._config.sampler.is_flow
        self._initial = SlowWeights(self._backend.trained, 0.0, 0.0, ShardedWriter().copied) if compares else NullSlow()

    def update(
        self, groups: Sequence[ScoredGroup], version: int, *, portion: Portion | None = None, **more: object
    ) -> UpdateReport:
        """Takes one optimizer step to `version` on these rows; skips rows without trained tokens."""
        assert not more, f"a step of an offline job has rows alone, not {sorted(more)}"
        with self._profiler.update(version):
            examples = self._compared(self._examples(groups, portion))
            totals, meter = totals_of(examples), Meter(self._config.learner.sequence_parallel)
            rate = learning_rate(self._config.learner, version - 1, self._config.num_steps)
            is_taken, metrics = False, {"loss": 0.0, "grad_norm": 0.0}
            if totals.num_tokens > 0:
                grad_norm = self._optimized([Term(examples, partial(self._part, totals, meter))], rate)
                is_taken, metrics = math.isfinite(grad_norm), {**meter.reduce(), "grad_norm": grad_norm}
            self.version = version
            counts = {"skipped": float(not is_taken), "optimizer_steps": float(is_taken)}
            return UpdateReport(version, {**metrics, "learning_rate": rate, **counts})

    def assess(self, groups: Sequence[ScoredGroup], portion: Portion | None = None) -> Mapping[str, float]:
        """Returns the job's metrics on these rows without training."""
        examples = self._compared(self._examples(groups, portion))
        totals, meter = totals_of(examples), Meter(self._config.learner.sequence_parallel)
        with self._backend.inference():
            for rows in self._step.shares(examples):
                self._part(totals, meter, rows)
        return meter.reduce()

    def _examples(self, groups: Sequence[ScoredGroup], portion: Portion | None = None) -> list[SharedExample]:
        row, timeout_s = self._offline_objective.row, self._config.timeouts.object_s
        return self._shares.fetch(DataRows([groups], self._config.learner, row, timeout_s, portion))

    def _compared(self, examples: list[SharedExample]) -> list[SharedExample]:
        """Adds outputs of the initial weights to this rank's examples: predicted velocities for a flow model, log-probs
        for adapters with `reference.place=learner_ranks`. Other examples have log-probs from scorers, or need none.
        """
        if self._config.sampler.is_flow:
            with self._initial.in_place(), self._backend.inference():
                return self._measured(examples, self._predicted)
        if self._config.reference.place == "learner_ranks":
            # Re-enable adapters after resharding: gathered parameters are not the tensors that the optimizer holds.
            with without_adapters(self._policy), self._backend.inference():
                return self._measured(examples, self._logprobs)
        return examples

    def _measured(
        self, examples: list[SharedExample], measure: Callable[[ExampleBatch, Sequence[Example]], list[Example]]
    ) -> list[SharedExample]:
        measured: dict[int, SharedExample] = {}
        for rows in self._step.shares(examples):
            batch = collate_examples(rows, self._reader, self._device)
            whole = all_whole(rows, Example)
            measured |= {id(row): new for row, new in zip(whole, measure(batch, whole), strict=True)}
        return [measured.get(id(example), example) for example in examples]

    def _predicted(self, batch: ExampleBatch, rows: Sequence[Example]) -> list[Example]:
        predicted = self._policy(batch.tokens, self._scoring.canary).predicted.cpu().numpy()
        return [row.compared(part) for row, part in zip(rows, np.split(predicted, len(rows)), strict=True)]

    def _logprobs(self, batch: ExampleBatch, rows: Sequence[Example]) -> list[Example]:
        logprobs = iter(self._policy(batch.tokens, PLAIN).logprobs.cpu().numpy())
        return [row.referred([next(logprobs) for _ in row.candidates]) for row in rows]

    def _part(self, totals: ExampleTotals, meter: Meter, rows: Sequence[SharedExample]) -> Tensor:
        batch = collate_examples(rows, self._reader, self._device)
        return self._offline_objective(self._policy, batch, totals, meter)
