"""Signs of reward hacking: measured quantities, their windows, and the sequential tests over them."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol

from mobula.cluster.metrics.report.samples import repeated_words
from mobula.cluster.records.trajectory import Reward, ScoredGroup, TrajectoryGroup


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
class Window:
    """The pooled groups of the steps `first` to `last`, or of an evaluation (its version is both)."""

    first: int
    last: int
    moments: Mapping[Quantity, Moments]

    @classmethod
    def pooled(cls, windows: Sequence[Window]) -> Window:
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
    pending: list[Window] = field(default_factory=list)

    def add(self, values: Window) -> bool:
        """Adds a step; returns whether it completes a window. A step without a group is left out."""
        if not any(moments.num for moments in values.moments.values()):
            return False
        self.pending.append(values)
        if len(self.pending) < self.num_steps:
            return False
        self.windows.append(Window.pooled(self.pending))
        self.pending.clear()
        return True

    def cut(self, after: int) -> None:
        """Removes the steps after `after`, whose weights a rollback has discarded."""
        self.windows = [window for window in self.windows if window.last <= after]
        self.pending.clear()

    def state(self) -> dict[str, Any]:
        return {"windows": [_plain(window) for window in self.windows], "pending": [_plain(v) for v in self.pending]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.windows, self.pending = ([_window(row) for row in state[key]] for key in ("windows", "pending"))


def _plain(window: Window) -> dict[str, Any]:
    moments = {quantity.value: [m.num, m.mean, m.m2] for quantity, m in window.moments.items()}
    return {"first": window.first, "last": window.last, "moments": moments}


def _window(row: Mapping[str, Any]) -> Window:
    moments = {Quantity(name): Moments(*values) for name, values in row["moments"].items()}
    return Window(row["first"], row["last"], moments)


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
        from scipy.special import stdtrit  # slow import, which runs without a guard do not need

        one_sided = -float(stdtrit(self.degrees, level))  # critical value of Student's t distribution
        return self.t / one_sided


def difference(a: Moments, b: Moments, margin: float = 0.0) -> Difference:
    """How far the mean of `b` is above that of `a` by more than `margin` (Welch's t, Welch-Satterthwaite degrees).
    Windows with fewer than `MIN_GROUPS` groups differ by 0."""
    if min(a.num, b.num) < MIN_GROUPS:
        return Difference(0.0, 1.0)
    excess = b.mean - a.mean - margin
    parts = (a.variance / a.num, b.variance / b.num)
    error = math.sqrt(sum(parts))
    if error <= 1e-9 * max(1.0, abs(a.mean), abs(b.mean)):  # all groups are equal: rounding is no difference
        return Difference(math.inf if excess > 1e-6 * max(1.0, abs(a.mean)) else 0.0, 1.0)
    degrees = sum(parts) ** 2 / sum(part**2 / (m.num - 1) for part, m in zip(parts, (a, b), strict=True))
    return Difference(excess / error, degrees)


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


class Drift:
    """It is an alarm if the mean of the newest window is further from that of the first than a margin allows, by more
    than the critical value times the standard error."""

    def __init__(
        self,
        name: str,
        quantity: Quantity,
        *,
        rise: float | None = None,
        fall: float | None = None,
        ratio: bool = False,
    ) -> None:
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
    degrees = a.num + b.num - 2
    deviation = math.sqrt((a.m2 + b.m2) / degrees) if degrees > 0 else 0.0  # of group means within the windows
    return difference(a, b, min_effect * deviation)


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


# Name of a sign, a key of `guard.limits` -> the sign with that limit.
DRIFTS: Mapping[str, Callable[[float], Drift]] = {
    # Mean tokens above `limit` times, or below 1 / `limit` of, those of the first window; `limit` > 1.
    "length": lambda limit: Drift("length", Quantity.LENGTH, rise=limit - 1, fall=1 - 1 / limit, ratio=True),
    # The share of repeated n-grams, or of letters outside a response's most frequent script, rises by more than it.
    "repetition": lambda limit: Drift("repetition", Quantity.REPETITION, rise=limit),
    "language": lambda limit: Drift("language", Quantity.SCRIPT_MIX, rise=limit),
    # The mean of the components with function `format` falls by more than `limit`.
    "format": lambda limit: Drift("format", Quantity.FORMAT, fall=limit),
}
TEXTS = frozenset({Quantity.REPETITION, Quantity.SCRIPT_MIX})  # need the responses' texts

GROUPS = "guard_groups"  # metric: groups behind reward and judge

TEXT_GROUPS = "guard_text_groups"  # metric: groups behind quantities of texts


@dataclass(frozen=True)
class Observer:
    """Measures `quantities` of the groups of a step. `judge_weights` maps judges to weights; `format_components` names
    the components of the format share. Of texts it reads `num_text_groups` groups a step, through `fetch`."""

    quantities: frozenset[Quantity]
    judge_weights: Mapping[str, float]
    format_components: Sequence[str]
    num_text_groups: int
    ngram: int
    fetch: Callable[..., list[Any]]
    timeout_s: float

    def observe(self, step: int, groups: Sequence[ScoredGroup], *, since: int = 0) -> Window:
        """Returns the means of `groups`, without those that weights before version `since` sampled in part. Fetches
        texts: call it in a thread."""
        groups = [group for group in groups if group.summary.oldest_version >= since]
        values: dict[Quantity, list[float]] = {
            Quantity.LENGTH: [group.summary.num_tokens / group.summary.num_trajectories for group in groups],
            Quantity.FORMAT: _means([self._formats(group.scored_rewards) for group in groups]),
            **reward_and_judge([group.scored_rewards for group in groups], self.judge_weights),
        }
        if self.quantities & TEXTS:
            stride = max(1, len(groups) // self.num_text_groups)
            chosen = [group.group for group in groups[::stride][: self.num_text_groups]]
            fetched: list[TrajectoryGroup] = self.fetch(chosen, timeout_s=self.timeout_s, what="groups for the guard")
            texts = [[t.response.text for t in group.trajectories] for group in fetched]
            values[Quantity.REPETITION] = _means([[repeated_words(t, self.ngram) for t in group] for group in texts])
            values[Quantity.SCRIPT_MIX] = _means([[script_mix(text) for text in group] for group in texts])
        return Window(step, step, {q: Moments.of(values[q]) for q in sorted(self.quantities) if values[q]})

    def _formats(self, rewards: Sequence[Reward]) -> list[float]:
        return [r.components[name] for r in rewards for name in self.format_components if name in r.components]


def reward_and_judge(
    rewards: Sequence[Sequence[Reward]], judge_weights: Mapping[str, float]
) -> dict[Quantity, list[float]]:
    """Returns the group means of the trained reward and of the judge's sum, over the responses that were judged.

    `rewards` has the scored responses of each group (or held-out prompt); groups without a judged response are left
    out of both, so the two are paired.
    """
    judged = [[(r.value, _judged(r, judge_weights)) for r in of_group] for of_group in rewards]
    paired = [[(value, judge) for value, judge in of_group if judge is not None] for of_group in judged]
    return {
        Quantity.REWARD: _means([[value for value, _ in of_group] for of_group in paired]),
        Quantity.JUDGE: _means([[judge for _, judge in of_group] for of_group in paired]),
    }


def _judged(reward: Reward, weights: Mapping[str, float]) -> float | None:
    parts = [weight * reward.components[name] for name, weight in weights.items() if name in reward.components]
    return math.fsum(parts) if parts else None


def script_mix(text: str) -> float:
    """Share of the letters outside the most frequent script (Unicode names: LATIN, CYRILLIC, CJK, ...)."""
    scripts = Counter(script for character in text if (script := _script(character)))
    total = sum(scripts.values())
    return 1 - max(scripts.values()) / total if total else 0.0


@lru_cache(maxsize=65_536)
def _script(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0] if character.isalpha() else ""


def metrics_of(values: Window) -> dict[str, float]:
    """Returns the metrics of a step: mean and standard error of each quantity, and the numbers of groups."""
    metrics: dict[str, float] = {}
    for quantity, moments in values.moments.items():
        metrics |= {f"guard_{quantity}": moments.mean, f"guard_{quantity}_se": moments.standard_error}
        if quantity is Quantity.JUDGE:
            metrics[GROUPS] = float(moments.num)
        elif quantity in TEXTS:
            metrics[TEXT_GROUPS] = float(moments.num)
    return metrics


def _means(groups: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(values) / len(values) for values in groups if values]
