"""TensorBoardSink: scalars in TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from cluster.metrics.sinks.scalars import evaluation_scalars, step_scalars
from cluster.metrics.step_records import EvaluationRecord, StepRecord


class TensorBoardSink:
    """Writes below `folder`. A run that goes on from `version` has TensorBoard forget what came later."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, version: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=version + 1)

    def emit(self, record: StepRecord) -> None:
        """One event a step, with all its scalars."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in step_scalars(record).items()]
        self._writer.file_writer.add_summary(Summary(value=values), record.step)

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        for tag, value in evaluation_scalars(record).items():
            self._writer.add_scalar(tag, value, record.version)

    def close(self) -> None:
        self._writer.close()
