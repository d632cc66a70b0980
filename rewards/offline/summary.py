"""Summary of scored rows: exact means, counts and examples, independent of order and size of the batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_UNIT = 1 << 60  # sums are integers in units of 2**-60: they do not depend on the order of their terms
DIGITS = 6
MAX_BROKEN = 20  # invalid rows in the report; all are counted
RIGHT = 1.0  # smallest value of the accuracy component of a right response


@dataclass
class Mean:
    """The mean of numbers, exact until rounding."""

    num: int = 0
    sum_units: int = 0

    def add(self, values: Iterable[float]) -> None:
        for value, count in Counter(values).items():
            numerator, denominator = value.as_integer_ratio()
            self.num += count
            self.sum_units += count * (numerator * _UNIT // denominator)

    def merge(self, other: Mean) -> None:
        self.num += other.num
        self.sum_units += other.sum_units

    @property
    def value(self) -> float:
        return round(self.sum_units / (self.num * _UNIT), DIGITS) if self.num else 0.0


@dataclass
class ScoreSummary:
    """The results of some rows. Examples are sorted by total; ties are won by the earlier row."""

    num_records: int = 0
    num_broken: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)  # row, fault; the first ones
    unscored: Counter[str] = field(default_factory=Counter)  # component and kind of failure -> records
    total: Mean = field(default_factory=Mean)
    components: dict[str, Mean] = field(default_factory=dict)
    num_passed: int = 0
    num_right: int = 0
    num_in_words: int = 0  # records without a token count, whose length is a number of words
    num_right_below: int = 0  # right by the accuracy component, below the threshold by the total
    right_below: list[str | int] = field(default_factory=list)  # ids or rows of the first ones
    best: list[dict[str, Any]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)

    def merge(self, other: ScoreSummary, top_k: int, max_ids: int) -> None:
        """Adds the next rows."""
        for name in ("num_records", "num_broken", "num_passed", "num_right", "num_right_below", "num_in_words"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.broken = [*self.broken, *other.broken][:MAX_BROKEN]
        self.unscored.update(other.unscored)
        self.total.merge(other.total)
        for name, mean in other.components.items():
            self.components.setdefault(name, Mean()).merge(mean)
        self.right_below = [*self.right_below, *other.right_below][:max_ids]
        self.best = sorted([*self.best, *other.best], key=lambda e: (-e["reward"], e["row"]))[:top_k]
        worst = sorted([*self.worst, *other.worst], key=lambda e: (-e["reward"], e["row"]))
        self.worst = worst[max(0, len(worst) - top_k) :]

    def report(self, accuracy_component: str, pass_threshold: float) -> dict[str, Any]:
        """Returns the figures by name; shares refer to the records with a score."""
        num = max(1, self.total.num)
        return {
            "num_records": self.num_records,
            "num_broken": self.num_broken,
            "broken": [{"row": row, "fault": fault} for row, fault in self.broken],
            "num_scored": self.total.num,
            "num_lengths_in_words": self.num_in_words,
            "unscored": dict(sorted(self.unscored.items())),
            "average_reward": self.total.value,
            "pass_threshold": pass_threshold,
            "pass_rate": round(self.num_passed / num, DIGITS),
            "component_averages": {name: mean.value for name, mean in self.components.items()},
            "accuracy": {
                "component": accuracy_component,
                "share_right": round(self.num_right / num, DIGITS),
                "num_right": self.num_right,
                "num_right_below_threshold": self.num_right_below,
                "right_below_threshold": self.right_below,
            },
            "best": self.best,
            "worst": self.worst,
        }


def shortened(values: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
    """Shortens a text and appends the number of omitted characters."""
    return {
        name: f"{value[:max_chars]} [... {len(value) - max_chars} characters more]"
        if isinstance(value, str) and len(value) > max_chars
        else value
        for name, value in values.items()
    }
