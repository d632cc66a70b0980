"""Records that the metrics hub passes to sinks: StepRecord, EvaluationRecord and SampleRecord; the first two also as
lines of JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

HELD_OUT = "held_out"  # the suite that gives the accuracy of the run
Counters = Mapping[str, Mapping[str, int]]  # counter -> reason -> count since the start of the run


@dataclass(frozen=True)
class StepRecord:
    """One finished step.

    `seconds` holds each timed phase, `total` and `other` (total less all phases); `staleness` maps a lag in versions to
    trained tokens; `components` maps a reward component to its mean; `counters` are cumulative; `correlations` are
    those of `step_values.correlations`.
    """

    step: int
    seconds: Mapping[str, float]
    values: Mapping[str, float]
    staleness: Mapping[int, int]
    components: Mapping[str, float]
    counters: Counters
    correlations: Mapping[str, float] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of the parts of the step, `other` last; they sum to `total`."""
        return {name: s for name, s in self.seconds.items() if name != "total"}


@dataclass(frozen=True)
class EvaluationRecord:
    """Accuracy of one weight version on one suite of held-out prompts, with its 95 % interval.

    `values` holds further metrics: `pass_at_<k>`, `response_length` (tokens), `truncated` and ratios.
    """

    version: int
    accuracy: float
    low: float
    high: float
    num: int
    suite: str = HELD_OUT
    values: Mapping[str, float] = field(default_factory=dict)


MetricsRecord = StepRecord | EvaluationRecord


@dataclass(frozen=True)
class SampleRecord:
    """One response of a step for the report, with the images of its prompt as PNG."""

    step: int
    kind: str  # best, worst or random of its step
    prompt: str
    response: str
    references: tuple[str, ...]
    reward: float
    images: tuple[bytes, ...]


def record_version(record: MetricsRecord) -> int:
    """Returns the weight version of a record: step s makes version s."""
    return record.step if isinstance(record, StepRecord) else record.version


def to_line(record: MetricsRecord) -> str:
    """Formats a record as one line of strict JSON; non-finite numbers become the strings "nan", "inf" and "-inf"."""
    kind = "step" if isinstance(record, StepRecord) else "evaluation"
    return json.dumps({"kind": kind, **strict(asdict(record))}, allow_nan=False)


def from_line(line: str) -> MetricsRecord:
    """The inverse of `to_line`."""
    row = json.loads(line)
    kind = row.pop("kind")
    if kind == "evaluation":
        accuracy, low, high = (float(row[key]) for key in ("accuracy", "low", "high"))
        suite, values = row.get("suite", HELD_OUT), _floats(row.get("values", {}))  # older files have neither
        return EvaluationRecord(row["version"], accuracy, low, high, row["num"], suite, values)
    if kind != "step":
        raise ValueError(f"a metrics line of kind {kind!r} is unknown: this file is not a metrics.jsonl of Mobula")
    return StepRecord(
        step=row["step"],
        seconds=_floats(row["seconds"]),
        values=_floats(row["values"]),
        staleness={int(lag): tokens for lag, tokens in row["staleness"].items()},
        components=_floats(row["components"]),
        counters=row["counters"],
        correlations=_floats(row.get("correlations", {})),  # older files have none
    )


def strict(value: Any) -> Any:
    """Returns `value` for strict JSON: keys are strings, non-finite numbers are replaced by strings."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _floats(row: Mapping[str, float | str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items()}
