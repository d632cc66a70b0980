"""Sink: a destination of metrics records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord


class Sink(Protocol):
    """A destination of metrics records. The hub drops a sink that raises."""

    name: str

    def emit(self, record: StepRecord) -> None: ...

    def emit_evaluation(self, record: EvaluationRecord) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class SampleSink(Sink, Protocol):
    """A sink that also shows responses with their images."""

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Shows responses of one step, at least one."""
        ...
