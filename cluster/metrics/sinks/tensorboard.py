"""TensorBoardSink: scalars in TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from cluster.metrics.records import EvaluationRecord, StepRecord


class TensorBoardSink:
    """Writes below `folder`. A run that goes on from `version` tells TensorBoard to forget what came later."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, version: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=version + 1)

    def emit(self, record: StepRecord) -> None:
        for name, value in record.values.items():
            self._writer.add_scalar(f"step/{name}", value, record.step)
        for name, value in record.components.items():
            self._writer.add_scalar(f"reward/{name}", value, record.step)
        for phase, seconds in record.seconds.items():
            self._writer.add_scalar(f"seconds/{phase}", seconds, record.step)
        for name, reasons in record.counters.items():
            for reason, count in reasons.items():
                self._writer.add_scalar(f"count_{name}/{reason}", count, record.step)

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        self._writer.add_scalar("evaluation/accuracy", record.accuracy, record.version)

    def close(self) -> None:
        self._writer.close()
