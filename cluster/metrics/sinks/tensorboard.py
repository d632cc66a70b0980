"""TensorBoardSink: scalars in TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord


class TensorBoardSink:
    """Writes below `folder`. A run that goes on from `version` tells TensorBoard to forget what came later."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, version: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=version + 1)

    def emit(self, record: StepRecord) -> None:
        """One event a step, with all its scalars."""
        scalars = {f"step/{name}": value for name, value in record.values.items()}
        scalars |= {f"reward/{name}": value for name, value in record.components.items()}
        scalars |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
        for name, reasons in record.counters.items():
            scalars |= {f"count_{name}/{reason}": count for reason, count in reasons.items()}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.file_writer.add_summary(Summary(value=values), record.step)

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        """Tags are `evaluation/<name>`, and `evaluation_<suite>/<name>` for suites beside the run's own."""
        group = "evaluation" if record.suite == HELD_OUT else f"evaluation_{record.suite}"
        for name, value in {"accuracy": record.accuracy, **record.values}.items():
            self._writer.add_scalar(f"{group}/{name}", value, record.version)

    def close(self) -> None:
        self._writer.close()
