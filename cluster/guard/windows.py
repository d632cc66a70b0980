"""Windows of observations and the sequential test over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Quantity(StrEnum):
    """What is measured in each group. Its mean is the metric `guard_<quantity>`, the standard error has `_se`."""

    REWARD = "reward"  # of groups with a judge: the trained reward
    JUDGE = "judge"  # weighted sum of the components with trained=false
    LENGTH = "length"  # trained tokens of a response
    REPETITION = "repetition"  # share of n-grams of words that occurred before in the response
    SCRIPT_MIX = "script_mix"  # share of letters outside the response's most frequent script
    FORMAT = "format"  # value of the components with function `format`


@dataclass(frozen=True)
class Moments:
    """Number, mean and sum of squared deviations of group means."""

    num: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        """Moments of `values` [N], one for each group."""
        if not values:
            return cls()
        mean = math.fsum(values) / len(values)
        return cls(len(values), mean, math.fsum((value - mean) ** 2 for value in values))

    @classmethod
    def from_error(cls, num: int, mean: float, standard_error: float) -> Moments:
        """Moments of `num` groups from a recorded mean and its standard error, s / sqrt(num)."""
        return cls(num, mean, standard_error**2 * num * max(num - 1, 0))

    def __add__(self, other: Moments) -> Moments:
        """Pools two sets of groups (Chan, Golub, LeVeque 1983)."""
        num = self.num + other.num
        if num == 0:
            return self
        step = other.mean - self.mean
        mean = self.mean + step * other.num / num
        return Moments(num, mean, self.m2 + other.m2 + step**2 * self.num * other.num / num)

    @property
    def variance(self) -> float:
        """Of a group mean, with N - 1 degrees of freedom; 0 for fewer than two groups."""
        return self.m2 / (self.num - 1) if self.num > 1 else 0.0

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.variance / self.num) if self.num else 0.0


@dataclass(frozen=True)
class StepValues:
    """The group means of one step, or of one evaluation (`step` is its version)."""

    step: int
    moments: Mapping[Quantity, Moments]


@dataclass(frozen=True)
class Window:
    """The pooled groups of the steps `first` to `last`."""

    first: int
    last: int
    moments: Mapping[Quantity, Moments]

    @classmethod
    def of(cls, steps: Sequence[StepValues]) -> Window:
        """The window of consecutive steps."""
        return cls.pooled([cls(values.step, values.step, values.moments) for values in steps])

    @classmethod
    def pooled(cls, windows: Sequence[Window]) -> Window:
        """One window of all their groups."""
        quantities = dict.fromkeys(quantity for window in windows for quantity in window.moments)
        moments = {
            quantity: sum((w.moments[quantity] for w in windows if quantity in w.moments), start=Moments())
            for quantity in quantities
        }
        return cls(windows[0].first, windows[-1].last, moments)

    @property
    def shown_steps(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


@dataclass
class Series:
    """Complete windows of `num_steps` steps each, and the steps of the next one."""

    num_steps: int
    windows: list[Window] = field(default_factory=list)
    pending: list[StepValues] = field(default_factory=list)

    def add(self, values: StepValues) -> bool:
        """Adds a step; returns whether it completes a window. A step without a group is left out."""
        if not any(moments.num for moments in values.moments.values()):
            return False
        self.pending.append(values)
        if len(self.pending) < self.num_steps:
            return False
        self.windows.append(Window.of(self.pending))
        self.pending.clear()
        return True

    def cut(self, after: int) -> None:
        """Removes the steps after `after`, whose weights a rollback has discarded."""
        self.windows = [window for window in self.windows if window.last <= after]
        self.pending.clear()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {"windows": [_plain(window) for window in self.windows], "pending": [_plain(v) for v in self.pending]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.windows = [Window(row["first"], row["last"], _moments(row)) for row in state["windows"]]
        self.pending = [StepValues(row["last"], _moments(row)) for row in state["pending"]]


def _plain(row: Window | StepValues) -> dict[str, Any]:
    first, last = (row.first, row.last) if isinstance(row, Window) else (row.step, row.step)
    moments = {quantity.value: [m.num, m.mean, m.m2] for quantity, m in row.moments.items()}
    return {"first": first, "last": last, "moments": moments}


def _moments(row: Mapping[str, Any]) -> dict[Quantity, Moments]:
    return {Quantity(name): Moments(*values) for name, values in row["moments"].items()}


def windows_of(steps: Iterable[StepValues], num_steps: int) -> list[Window]:
    """Returns the complete windows of a recorded run."""
    series = Series(num_steps)
    for values in steps:
        series.add(values)
    return series.windows


MIN_GROUPS = 8  # of a window, for the test to be defined


@dataclass(frozen=True)
class Level:
    """The level of the tests at one look.

    Look n (n >= 2, one for each complete window) may spend a / (n (n - 1)) of the run's false alarm rate a, divided
    over its comparisons. The sum over all n is a, so by the union bound a sign gives a false alarm in at most the share
    a of runs, however long they are (alpha spending, Lan and DeMets 1983, with a fixed schedule).
    """

    false_alarm_rate: float
    look: int

    def of(self, num_comparisons: int) -> float:
        """The level of each of the comparisons of this look."""
        return self.false_alarm_rate / (self.look * (self.look - 1)) / max(num_comparisons, 1)


@dataclass(frozen=True)
class Difference:
    """Difference of two means in standard errors, and the degrees of freedom."""

    t: float
    degrees: float

    def strength(self, level: float) -> float:
        """t / critical value of a one-sided Student test at `level`; 1 or more rejects. 0 where t is not positive."""
        if not self.t > 0:
            return 0.0
        if math.isinf(self.t):
            return math.inf
        return self.t / critical_value(level, self.degrees)


def critical_value(level: float, degrees: float) -> float:
    """The one-sided critical value of Student's t distribution."""
    from scipy.special import stdtrit  # slow import, which runs without a guard do not need

    return -float(stdtrit(degrees, level))


def pooled_deviation(a: Moments, b: Moments) -> float:
    """Standard deviation of group means within two windows."""
    degrees = a.num + b.num - 2
    return math.sqrt((a.m2 + b.m2) / degrees) if degrees > 0 else 0.0


def difference(a: Moments, b: Moments, margin: float = 0.0) -> Difference:
    """How far the mean of `b` is above that of `a` by more than `margin` (Welch's t, Welch-Satterthwaite degrees).

    Windows with fewer than `MIN_GROUPS` groups differ by 0.
    """
    if min(a.num, b.num) < MIN_GROUPS:
        return Difference(0.0, 1.0)
    excess = b.mean - a.mean - margin
    parts = (a.variance / a.num, b.variance / b.num)
    error = math.sqrt(sum(parts))
    if error <= 1e-9 * max(1.0, abs(a.mean), abs(b.mean)):  # all groups are equal: rounding is no difference
        return Difference(math.inf if excess > 1e-6 * max(1.0, abs(a.mean)) else 0.0, 1.0)
    degrees = sum(parts) ** 2 / sum(part**2 / (m.num - 1) for part, m in zip(parts, (a, b), strict=True))
    return Difference(excess / error, degrees)
