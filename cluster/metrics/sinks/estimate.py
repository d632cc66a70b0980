"""EstimateSink: logs the estimated rest of the run once a few steps are measured."""

from __future__ import annotations

import logging

from mobula.cluster.metrics.step_records import EvaluationRecord, StepRecord

_logger = logging.getLogger(__name__)

NUM_MEASURED = 3  # steps; the first fills caches and is left out of the mean


class EstimateSink:
    """Logs once, after the third step of this start. The run ends at step `num_steps`."""

    name = "estimate"

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._seconds: list[float] = []

    def emit(self, record: StepRecord) -> None:
        if len(self._seconds) == NUM_MEASURED:
            return
        self._seconds.append(record.seconds["total"])
        num_left = self._num_steps - record.step
        if len(self._seconds) == NUM_MEASURED and num_left > 0:
            step_s = sum(self._seconds[1:]) / (NUM_MEASURED - 1)
            _logger.info("a step takes %.1f s: about %s left for %d steps", step_s, _about(step_s * num_left), num_left)

    def emit_evaluation(self, record: EvaluationRecord) -> None: ...

    def close(self) -> None: ...


def _about(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
