"""A sequential test of differences between windows, with a bound on the false alarms of a whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mobula.cluster.guard.windows import Moments

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
