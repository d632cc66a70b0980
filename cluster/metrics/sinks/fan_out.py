"""FanOut: passes every record to every sink, and drops a sink that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mobula.cluster.metrics.sinks.base import SampleSink, Sink
from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord

_logger = logging.getLogger(__name__)


class FanOut:
    """All sinks of a run. A sink that raises is logged once, reported to `on_dropped` by name, and not called again."""

    def __init__(self, sinks: Sequence[Sink], on_dropped: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._on_dropped = on_dropped

    def emit(self, record: StepRecord) -> None:
        self._each(lambda sink: sink.emit(record))

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        self._each(lambda sink: sink.emit_evaluation(record))

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Passes responses to the sinks that show them."""
        self._each(lambda sink: sink.emit_samples(samples) if isinstance(sink, SampleSink) else None)

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception:  # a full disk or a lost tracker must not end the run
                _logger.exception("metrics sink %s failed and is dropped; the run goes on without it", sink.name)
                self._sinks.remove(sink)
                self._on_dropped(sink.name)
