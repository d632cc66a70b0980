"""Sink: one place that records are written to."""

from __future__ import annotations

from typing import Protocol

from cluster.metrics.step_records import EvaluationRecord, StepRecord


class Sink(Protocol):
    """One place that records are written to; it may raise, and is then dropped by the hub."""

    name: str

    def emit(self, record: StepRecord) -> None: ...

    def emit_evaluation(self, record: EvaluationRecord) -> None: ...

    def close(self) -> None: ...
