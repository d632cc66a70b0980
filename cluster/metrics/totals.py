"""RunTotals: means, maxima and sums of the whole run, updated from the step records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord


class RunTotals:
    """The numbers of the summary. After a resume they are rebuilt from the records in `metrics.jsonl`."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.version = 0  # made by the newest step
        self.num_samples = 0
        self.num_tokens = 0
        self.optimizer_steps = 0
        self.over_age_tokens = 0
        self.media_bytes_referenced = 0
        self.seconds: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.last_values: dict[str, float] = {}
        self._gap_sum, self._gap_tokens = 0.0, 0
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
            # A step without tokens of version lag 0 has a gap from a few fresh samples: it counts as one token.
            num_tokens = max(1, record.staleness.get(0, 0))
            self._gap_sum += values[MetricName.LOGPROB_GAP_MEAN] * num_tokens
            self._gap_tokens += num_tokens
        for name, value in values.items():
            known = self._maxima.setdefault(name, value)
            self._maxima[name] = float(np.maximum(known, value))  # NaN stays NaN: a broken number must not look good

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Adds an evaluation; it replaces an earlier result of the same version and suite."""
        self._evaluations[record.version, record.suite] = record

    @property
    def evaluations(self) -> Sequence[EvaluationRecord]:
        """Evaluations of the run's own held-out suite, oldest version first."""
        return [self._evaluations[key] for key in sorted(self._evaluations) if key[1] == HELD_OUT]

    def has_evaluation(self, record: EvaluationRecord) -> bool:
        """Whether an earlier part of the run made the same evaluation of this version."""
        known = self._evaluations.get((record.version, record.suite))
        return known is not None and known.identity == record.identity

    @property
    def logprob_gap_mean(self) -> float | None:
        """Mean over all trained tokens of version lag 0 and fresh samples; None without any."""
        return self._gap_sum / self._gap_tokens if self._gap_tokens else None

    def maximum(self, name: MetricName) -> float | None:
        """Returns the largest value over all steps; None if no step has one."""
        return self._maxima[name] if name in self._maxima else None

    @property
    def samples_per_s(self) -> float | None:
        return self.num_samples / self.seconds["total"] if self.seconds["total"] > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.num_tokens / self.seconds["total"] if self.seconds["total"] > 0 else None
