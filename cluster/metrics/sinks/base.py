"""Sink: the Protocol, and the scalars and rows that trackers show."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from PIL import Image

from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, SampleRecord, StepRecord


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


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Returns `evaluation/<name>`, or `evaluation_<suite>/<name>` for other suites than the run's own."""
    group = "evaluation" if record.suite == HELD_OUT else f"evaluation_{record.suite}"
    own = {"accuracy": record.accuracy, "num_unscored": float(record.num_unscored)}
    return {f"{group}/{name}": value for name, value in {**own, **record.values}.items()}


class ScalarSink(ABC):
    """A sink that logs the scalars of steps and of evaluations in one way."""

    def emit(self, record: StepRecord) -> None:
        scalars = {f"step/{name}": value for name, value in record.values.items()}
        scalars |= {f"reward/{name}": value for name, value in record.components.items()}
        scalars |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
        for name, reasons in record.counters.items():
            scalars |= {f"count_{name}/{reason}": count for reason, count in reasons.items()}
        self._log(scalars, record.step)

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        self._log(evaluation_scalars(record), record.version)

    @abstractmethod
    def _log(self, scalars: Mapping[str, float], step: int) -> None: ...


TABLE = "samples"
COLUMNS = ("step", "kind", "prompt", "response", "references", "reward")  # images come last


def cells(sample: SampleRecord) -> list[Any]:
    """Returns the values of `COLUMNS`."""
    references = "\n".join(sample.references)
    return [sample.step, sample.kind, sample.prompt, sample.response, references, sample.reward]


def images(sample: SampleRecord) -> list[Image.Image]:
    return [Image.open(io.BytesIO(png)) for png in sample.images]
