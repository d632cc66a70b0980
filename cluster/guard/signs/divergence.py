"""The sign `judge`: the trained reward rises while the independent judge falls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mobula.cluster.guard.sequential_test import Difference, Level, difference, pooled_deviation
from mobula.cluster.guard.signs.base import SignVerdict
from mobula.cluster.guard.windows import Moments, Quantity, Window


class Divergence:
    """Compares the newest 1, 2, 4, ... windows with as many earlier ones, so that a slow change is seen, too.

    It is an alarm if in one comparison the reward is higher and the judge lower, each by more than `min_effect`
    standard deviations of group means plus the critical value times the standard error. Both tests have the full level:
    a false alarm needs both to be wrong (intersection-union test, Berger 1982).
    """

    name = "judge"
    quantities: tuple[Quantity, ...] = (Quantity.REWARD, Quantity.JUDGE)

    def __init__(self, min_effect: float) -> None:
        self._min_effect = min_effect

    def judge(self, windows: Sequence[Window], level: Level) -> SignVerdict:
        pairs = list(_comparisons(windows))
        each = level.of(len(pairs))
        strengths = [self._strength(before, after, each) for before, after in pairs]
        strongest = max(range(len(pairs)), key=strengths.__getitem__)
        before, after = pairs[strongest]
        text = (
            f"from {before.shown_steps} to {after.shown_steps} the trained reward rose from "
            f"{_shown(before, Quantity.REWARD)} to {_shown(after, Quantity.REWARD)} while the judge fell from "
            f"{_shown(before, Quantity.JUDGE)} to {_shown(after, Quantity.JUDGE)}"
        )
        is_alarm = strengths[strongest] >= 1
        candidates = [window for window in windows if not is_alarm or window.last <= before.last]
        return SignVerdict(strengths[strongest], _agreeing(candidates), text)

    def _strength(self, before: Window, after: Window, level: float) -> float:
        rise = _difference(before.moments[Quantity.REWARD], after.moments[Quantity.REWARD], self._min_effect)
        fall = _difference(after.moments[Quantity.JUDGE], before.moments[Quantity.JUDGE], self._min_effect)
        return min(rise.strength(level), fall.strength(level))


def _comparisons(windows: Sequence[Window]) -> Iterator[tuple[Window, Window]]:
    """Yields the pooled newest `size` windows with each earlier block of `size` windows, for size 1, 2, 4, ..."""
    size = 1
    while 2 * size <= len(windows):
        newest = Window.pooled(windows[-size:])
        for end in range(len(windows) - size, size - 1, -size):
            yield Window.pooled(windows[end - size : end]), newest
        size *= 2


def _difference(a: Moments, b: Moments, min_effect: float) -> Difference:
    return difference(a, b, min_effect * pooled_deviation(a, b))


def _agreeing(windows: Sequence[Window]) -> int:
    """Last step of the newest window whose judge is within one standard error of the best window."""
    judges = [window.moments[Quantity.JUDGE] for window in windows]
    best = max(judges, key=lambda moments: moments.mean)
    near = [
        window.last
        for window, judge in zip(windows, judges, strict=True)
        if judge.mean >= best.mean - (judge.standard_error**2 + best.standard_error**2) ** 0.5
    ]
    return near[-1]


def _shown(window: Window, quantity: Quantity) -> str:
    moments = window.moments[quantity]
    return f"{moments.mean:.3f} ± {moments.standard_error:.3f}"
