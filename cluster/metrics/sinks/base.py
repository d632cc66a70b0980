"""Sink: one place that records are written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord


class Sink(Protocol):
    """One place that records are written to; it may raise, and is then dropped by the hub."""

    name: str

    def emit(self, record: StepRecord) -> None: ...

    def emit_evaluation(self, record: EvaluationRecord) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class SampleSink(Sink, Protocol):
    """A sink that also shows responses with their pictures."""

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Responses of one step, at least one."""
        ...
