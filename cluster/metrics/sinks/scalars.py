"""The numbers of a record under the names that trackers show: `group/name`."""

from __future__ import annotations

from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Values of the step, of each reward component, seconds by phase, and counts by reason."""
    scalars = {f"step/{name}": value for name, value in record.values.items()}
    scalars |= {f"reward/{name}": value for name, value in record.components.items()}
    scalars |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    for name, reasons in record.counters.items():
        scalars |= {f"count_{name}/{reason}": count for reason, count in reasons.items()}
    return scalars


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """`evaluation/<name>`, and `evaluation_<suite>/<name>` for suites beside the run's own."""
    group = "evaluation" if record.suite == HELD_OUT else f"evaluation_{record.suite}"
    return {f"{group}/{name}": value for name, value in {"accuracy": record.accuracy, **record.values}.items()}
