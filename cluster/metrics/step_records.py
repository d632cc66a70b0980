"""Records that the metrics hub passes to sinks: StepRecord, EvaluationRecord and SampleRecord; the first two also as
lines of JSON. `BeforeAfter` pairs two evaluations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mobula.cluster.metrics.definitions import MetricName

HELD_OUT = "held_out"  # the suite that gives the accuracy of the run
CONTENT = "sha256:"  # begins the digests in an identity
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
    def accuracy(self) -> float | None:
        """Accuracy over all sampled responses; records of earlier versions have that of the trained ones."""
        return self.values.get(MetricName.SAMPLED_ACCURACY, self.values.get(MetricName.ACCURACY))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of the parts of the step, `other` last; they sum to `total`."""
        return {name: s for name, s in self.seconds.items() if name != "total"}


@dataclass(frozen=True)
class EvaluationRecord:
    """Accuracy of one weight version on one suite of held-out prompts, with its 95 % interval.

    `values` holds further metrics: `pass_at_<k>`, `response_length` (tokens), `truncated` and ratios. The mean is over
    `num` responses; `num_unscored` more have no score. `identity` names what was measured, such as split, rows and
    sampling: numbers with different identities are not comparable. Records of earlier versions have none.
    """

    version: int
    accuracy: float
    low: float
    high: float
    num: int
    suite: str = HELD_OUT
    values: Mapping[str, float] = field(default_factory=dict)
    num_unscored: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counted(self) -> str:
        """The responses, or prompts, behind the mean: `4 prompts`, or `3 of 4 prompts`."""
        whole = self.num + self.num_unscored
        unit = "prompts" if self.identity.get("num_samples") == 1 else "responses"
        return f"{self.num} of {whole} {unit}" if self.num_unscored else f"{whole} {unit}"


@dataclass(frozen=True)
class BeforeAfter:
    """The first and the newest evaluation of a suite. If they measured different things, `before` is None and `reason`
    says what differs."""

    before: EvaluationRecord | None
    after: EvaluationRecord | None
    reason: str = ""

    @classmethod
    def of(cls, records: Sequence[EvaluationRecord]) -> BeforeAfter:
        """Pairs the records of one suite, sorted by version."""
        if len(records) < 2:
            return cls(records[0] if records else None, None)
        first, last = records[0], records[-1]
        if first.identity == last.identity:
            return cls(first, last)
        changed = difference(first.identity, last.identity)
        return cls(None, last, f"version {first.version} was evaluated in another way: {changed}")


def distinct_identities(records: Iterable[EvaluationRecord]) -> list[Mapping[str, Any]]:
    """Returns the different identities of the records, in order."""
    return list({json.dumps(dict(record.identity), sort_keys=True): record.identity for record in records}.values())


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Names the parts of two identities that differ. Digests are named only if no other part differs."""
    if not old or not new:
        return "an earlier version of Mobula recorded no identity of the evaluation"
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    plain = [key for key in changed if not str(new.get(key, old.get(key))).startswith(CONTENT)]
    return ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in plain) or ", ".join(
        f"other {key.replace('_', ' ')}" for key in changed
    )


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
        later = (row.get("num_unscored", 0), row.get("identity", {}))
        return EvaluationRecord(row["version"], accuracy, low, high, row["num"], suite, values, *later)
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
