"""Signs of reward hacking; `guard.limits` switches those of drift on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mobula.cluster.guard.windows import Difference, Level, Moments, Quantity, Window, difference, pooled_deviation


@dataclass(frozen=True)
class SignVerdict:
    """The verdict on the newest window.

    `strength` is the evidence in units of the critical value: 1 or more is an alarm. `agreeing` is the last step of the
    newest window that shows no divergence (0: none). `text` states the figures.
    """

    strength: float
    agreeing: int
    text: str

    @property
    def is_alarm(self) -> bool:
        return self.strength >= 1


class Sign(Protocol):
    """A sign of reward hacking. A pure function of windows."""

    name: str
    quantities: tuple[Quantity, ...]

    def judge(self, windows: Sequence[Window], level: Level) -> SignVerdict:
        """Compares the newest of at least two windows, all with `quantities`, with the earlier ones."""
        ...


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


def length(limit: float) -> Drift:
    """Mean tokens above `limit` times, or below 1 / `limit` of, those of the first window; `limit` > 1."""
    return Drift("length", Quantity.LENGTH, rise=limit - 1, fall=1 - 1 / limit, ratio=True)


def repetition(limit: float) -> Drift:
    """The share of repeated n-grams rises by more than `limit`."""
    return Drift("repetition", Quantity.REPETITION, rise=limit, fall=None, ratio=False)


def language(limit: float) -> Drift:
    """The share of letters outside the response's most frequent script rises by more than `limit`."""
    return Drift("language", Quantity.SCRIPT_MIX, rise=limit, fall=None, ratio=False)


def format_share(limit: float) -> Drift:
    """The mean of the components with function `format` falls by more than `limit`."""
    return Drift("format", Quantity.FORMAT, rise=None, fall=limit, ratio=False)


DRIFTS: Mapping[str, Callable[[float], Drift]] = {
    "length": length,
    "repetition": repetition,
    "language": language,
    "format": format_share,
}


"""Name of a sign, a key of `guard.limits` -> the sign with that limit."""
