"""Sink: the Protocol, several as one, and the scalars and rows that trackers show."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
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
        ...


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


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Returns values of the step and of each reward component, seconds by phase, and counts by reason."""
    scalars = {f"step/{name}": value for name, value in record.values.items()}
    scalars |= {f"reward/{name}": value for name, value in record.components.items()}
    scalars |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    for name, reasons in record.counters.items():
        scalars |= {f"count_{name}/{reason}": count for reason, count in reasons.items()}
    return scalars


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Returns `evaluation/<name>`, or `evaluation_<suite>/<name>` for other suites than the run's own."""
    group = "evaluation" if record.suite == HELD_OUT else f"evaluation_{record.suite}"
    own = {"accuracy": record.accuracy, "num_unscored": float(record.num_unscored)}
    return {f"{group}/{name}": value for name, value in {**own, **record.values}.items()}


TABLE = "samples"
COLUMNS = ("step", "kind", "prompt", "response", "references", "reward")  # images come last


def cells(sample: SampleRecord) -> list[Any]:
    """Returns the values of `COLUMNS`."""
    references = "\n".join(sample.references)
    return [sample.step, sample.kind, sample.prompt, sample.response, references, sample.reward]


def images(sample: SampleRecord) -> list[Image.Image]:
    return [Image.open(io.BytesIO(png)) for png in sample.images]
