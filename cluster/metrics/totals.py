"""RunTotals: the whole run's means, maxima and sums, kept step by step from the records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.reducers import WeightedMean
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord


class RunTotals:
    """Everything the summary says; built again from `metrics.jsonl` after a resume by adding the kept records."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.version = 0  # that the newest step made
        self.num_samples = 0
        self.num_tokens = 0
        self.optimizer_steps = 0
        self.over_age_tokens = 0
        self.media_bytes_referenced = 0
        self.seconds: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.last_values: dict[str, float] = {}
        self._gap = WeightedMean()
        self._maxima: dict[str, float] = {}
        self._evaluations: dict[tuple[int, str], EvaluationRecord] = {}

    def add(self, record: StepRecord) -> None:
        values = record.values
        self.num_steps += 1
        self.version = record.step
        self.num_samples += round(values[MetricName.NUM_SAMPLES])
        self.num_tokens += round(values[MetricName.NUM_TOKENS])
        if MetricName.OPTIMIZER_STEPS in values:
            self.optimizer_steps += round(values[MetricName.OPTIMIZER_STEPS])
        if MetricName.OVER_AGE_TOKENS in values:
            self.over_age_tokens += round(values[MetricName.OVER_AGE_TOKENS])
        if MetricName.MEDIA_BYTES_REFERENCED in values:
            self.media_bytes_referenced += round(values[MetricName.MEDIA_BYTES_REFERENCED])
        self.seconds.update(record.seconds)
        self.staleness.update(record.staleness)
        self.last_values.update(values)
        if MetricName.LOGPROB_GAP_MEAN in values:
            # A step of older tokens alone has the gap of a few fresh ones: it counts as one token.
            self._gap.add(values[MetricName.LOGPROB_GAP_MEAN], max(1, record.staleness.get(0, 0)))
        for name, value in values.items():
            known = self._maxima.setdefault(name, value)
            self._maxima[name] = float(np.maximum(known, value))  # NaN stays NaN: a broken number must not look good

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Keep it; of a version and suite that is evaluated again the newer result is kept."""
        self._evaluations[record.version, record.suite] = record

    @property
    def evaluations(self) -> Sequence[EvaluationRecord]:
        """Those of the run's own held-out suite, by version, oldest first."""
        return [self._evaluations[key] for key in sorted(self._evaluations) if key[1] == HELD_OUT]

    def has_evaluation(self, version: int, suite: str) -> bool:
        return (version, suite) in self._evaluations

    @property
    def logprob_gap_mean(self) -> float | None:
        """Over all trained tokens of version lag 0, and fresh ones; None before there are some."""
        return self._gap.value

    def maximum(self, name: MetricName) -> float | None:
        """Largest value that any step had; None where no step had one."""
        return self._maxima[name] if name in self._maxima else None

    @property
    def samples_per_s(self) -> float | None:
        return self.num_samples / self.seconds["total"] if self.seconds["total"] > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.num_tokens / self.seconds["total"] if self.seconds["total"] > 0 else None
