"""Names the numbers of a record for trackers: `group/name`."""

from __future__ import annotations

from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord


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
