"""Scales of a chart: domains, ticks at round numbers, and how a number is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [0, 1], linearly or by logarithm."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """The position of `value` on the axis; values outside are placed at the edge."""
        if self.is_log:
            return Scale(math.log10(self.low), math.log10(self.high)).place(math.log10(max(value, self.low)))
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self) -> list[float]:
        """Three to seven round values inside the domain."""
        return _decades(self.low, self.high) if self.is_log else _round_steps(self.low, self.high, 4)


def linear_scale(values: Sequence[float], *, from_zero: bool) -> Scale:
    """A domain with round ends around finite `values`; one that is flat gets room on both sides."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(low, 0.0) if from_zero else low
    if high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
        room = abs(high) * 0.5 if high else 1.0
        low, high = (low if from_zero and low == 0 else low - room), high + room
    step = _round_step((high - low) / 4)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)


def log_scale(values: Sequence[float]) -> Scale:
    """Whole decades around the positive `values`."""
    positive = [v for v in values if v > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return Scale(10.0 ** max(low, -300), 10.0 ** max(high, low + 1), is_log=True)


def step_scale(first: int, last: int) -> Scale:
    """The axis of steps: half a step of room on both sides."""
    return Scale(first - 0.5, last + 0.5)


def step_ticks(first: int, last: int) -> list[float]:
    """Whole steps only."""
    ticks = [t for t in _round_steps(first, last, 5) if t == int(t) and first <= t <= last]
    return ticks or [float(first)]


def write_number(value: float) -> str:
    """A number with about three significant digits: 0.0312, 1.25, 12.5, 1,250, 3.1e-7."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e7:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(exponent)}"
    if size >= 100:
        return f"{value:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".")


def write_bytes(value: float) -> str:
    """A size in binary units: 3.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{write_number(value)} {unit}"
        value /= 1024
    return f"{write_number(value)} TiB"


def write_duration(seconds: float) -> str:
    """4.2 s, 3 min 05 s, 2 h 10 min."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{write_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))


def _round_steps(low: float, high: float, count: int) -> list[float]:
    if high <= low:
        return [low]
    step = _round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    stride = max(1, math.ceil((last - first) / 5))
    return [10.0**e for e in range(first, last + 1, stride)]
