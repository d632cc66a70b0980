"""Drift: a quantity of responses leaves its range around the first window."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.cluster.guard.sequential_test import Level, difference
from mobula.cluster.guard.signs.base import SignVerdict
from mobula.cluster.guard.windows import Moments, Quantity, Window


class Drift:
    """It is an alarm if the mean of the newest window is further from that of the first than a margin allows, by more
    than the critical value times the standard error.
    """

    def __init__(self, name: str, quantity: Quantity, *, rise: float | None, fall: float | None, ratio: bool) -> None:
        """`rise` and `fall` are margins (None: that direction is free), with `ratio` as shares of the first mean."""
        self.name = name
        self.quantities: tuple[Quantity, ...] = (quantity,)
        self._quantity = quantity
        self._rise, self._fall, self._is_ratio = rise, fall, ratio

    def judge(self, windows: Sequence[Window], level: Level) -> SignVerdict:
        first, newest = windows[0], windows[-1]
        strength = self._strength(first, newest, level)
        inside = [window for window in windows if not self._leaves(first, window)]
        a, b = (window.moments[self._quantity] for window in (first, newest))
        text = (
            f"{self._quantity.replace('_', ' ')} went from {a.mean:.3g} in {first.shown_steps} to {b.mean:.3g} in "
            f"{newest.shown_steps}, beyond guard.limits.{self.name}"
        )
        return SignVerdict(strength, inside[-1].last, text)

    def _strength(self, first: Window, newest: Window, level: Level) -> float:
        a, b = (window.moments[self._quantity] for window in (first, newest))
        strengths = [0.0]
        if self._rise is not None:
            strengths.append(difference(a, b, self._margin(a, self._rise)).strength(level.of(2)))
        if self._fall is not None:
            strengths.append(difference(b, a, self._margin(a, self._fall)).strength(level.of(2)))
        return max(strengths)

    def _leaves(self, first: Window, window: Window) -> bool:
        a, b = (w.moments[self._quantity].mean for w in (first, window))
        moments = first.moments[self._quantity]
        is_above = self._rise is not None and b - a > self._margin(moments, self._rise)
        is_below = self._fall is not None and a - b > self._margin(moments, self._fall)
        return is_above or is_below

    def _margin(self, first: Moments, limit: float) -> float:
        return limit * abs(first.mean) if self._is_ratio else limit
