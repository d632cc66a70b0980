"""Statistics of scored records: exact sums, counts and histograms, independent of the order of addition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mobula.rewards.offline.rules.schemes import Scheme, Scores

_UNIT = 1 << 60  # sums are integers in units of 2**-60, so that they do not depend on the order of their terms
NUM_BINS = 40
TOTAL = "total"


def _in_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * _UNIT // denominator


@dataclass
class ScoreHistogram:
    """The sum of a number and its histogram between `low` and `high`; values outside count in the last bins."""

    low: float
    high: float
    sum_units: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * NUM_BINS)

    def add(self, value: float, num: int) -> None:
        self.sum_units += num * _in_units(value)
        place = int((value - self.low) / (self.high - self.low) * NUM_BINS)
        self.bins[min(max(place, 0), NUM_BINS - 1)] += num

    def merge(self, other: ScoreHistogram) -> None:
        self.sum_units += other.sum_units
        self.bins = [ours + theirs for ours, theirs in zip(self.bins, other.bins, strict=True)]

    @property
    def mean(self) -> float:
        """The mean of what was added, 0 of nothing."""
        num = sum(self.bins)
        return self.sum_units / (num * _UNIT) if num else 0.0


@dataclass
class Tally:
    """One scheme's results over some records. `distributions` are those of the components and of `TOTAL`."""

    distributions: dict[str, ScoreHistogram]
    low: Counter[str] = field(default_factory=Counter)  # component -> records below its mark
    unscored: Counter[str] = field(default_factory=Counter)  # reason -> records
    num_scored: int = 0
    num_passed: int = 0
    num_false_passes: int = 0  # pass the manual check and not this scheme

    @classmethod
    def of(cls, scheme: Scheme) -> Tally:
        """An empty one; a total lies within the sum of the weights' sizes, a component within [-1, 1]."""
        reach = sum(map(abs, scheme.weights)) or 1.0
        distributions = {name: ScoreHistogram(-1.0, 1.0) for name in scheme.components}
        return cls({**distributions, TOTAL: ScoreHistogram(-reach, reach)})

    def add(self, scheme: Scheme, result: Scores | str, is_manual_pass: bool, num: int) -> None:
        """Add `num` records that got the same."""
        if isinstance(result, str):
            self.unscored[result] += num
            return
        total = scheme.total(result)
        self.num_scored += num
        self.num_passed += num * (total >= scheme.pass_threshold)
        self.num_false_passes += num * (is_manual_pass and total < scheme.pass_threshold)
        for name, score in scheme.named(result).items():
            self.distributions[name].add(score, num)
            if name in scheme.low_marks and score < scheme.low_marks[name]:
                self.low[name] += num
        self.distributions[TOTAL].add(total, num)

    def merge(self, other: Tally) -> None:
        for name, distribution in self.distributions.items():
            distribution.merge(other.distributions[name])
        self.low.update(other.low)
        self.unscored.update(other.unscored)
        self.num_scored += other.num_scored
        self.num_passed += other.num_passed
        self.num_false_passes += other.num_false_passes


@dataclass
class Disagreement:
    """In how many records two schemes differ: by component, in the total, and in the verdict."""

    components: Counter[str] = field(default_factory=Counter)
    num_passed_by_first_only: int = 0
    num_passed_by_second_only: int = 0

    def add(self, first: Scheme, second: Scheme, results: tuple[Scores | str, Scores | str], num: int) -> None:
        ours, theirs = results
        self.num_passed_by_first_only += num * (first.passes(ours) and not second.passes(theirs))
        self.num_passed_by_second_only += num * (second.passes(theirs) and not first.passes(ours))
        for name in differing(first, second, results):
            self.components[name] += num

    def merge(self, other: Disagreement) -> None:
        self.components.update(other.components)
        self.num_passed_by_first_only += other.num_passed_by_first_only
        self.num_passed_by_second_only += other.num_passed_by_second_only


def differing(first: Scheme, second: Scheme, results: tuple[Scores | str, Scores | str]) -> list[str]:
    """The components that both schemes have and judge differently, and `TOTAL`; none where one did not score."""
    ours, theirs = results
    if isinstance(ours, str) or isinstance(theirs, str):
        return []
    values = second.named(theirs)
    found = [name for name, score in first.named(ours).items() if name in values and score != values[name]]
    return [*found, TOTAL] if first.total(ours) != second.total(theirs) else found
