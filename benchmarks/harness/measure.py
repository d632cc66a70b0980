"""Shared by all benchmarks: sides measured in turn, the measurements as a record, and targets of ratios."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Side = Callable[[int], Awaitable[float]]
"""Measures once and returns a rate; it is given the round's number, from 0, so that all sides do the same work."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    repeats: int
    warmups: int
    num_steps: int  # of a training run


FULL = Effort(repeats=7, warmups=2, num_steps=40)
QUICK = Effort(repeats=2, warmups=1, num_steps=8)


@dataclass(frozen=True)
class Measurements:
    """One thing, measured several times."""

    what: str  # what was done, in words
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Claim:
    """A ratio; with a target it has to be at least that (`at_least`) or at most, without one it is information."""

    what: str
    ratio: float
    target: float | None = None
    at_least: bool = True

    @property
    def holds(self) -> bool:
        if self.target is None:
            return True
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def is_worse_than(self, baseline: Claim, tolerance: float) -> bool:
        """Whether the ratio is off the baseline's by more than the share `tolerance` of it, to the bad side."""
        if self.at_least:
            return self.ratio < baseline.ratio * (1 - tolerance)
        return self.ratio > baseline.ratio * (1 + tolerance)


@dataclass(frozen=True)
class Findings:
    """The measurements and claims of one benchmark."""

    settings: Mapping[str, Any]
    series: Mapping[str, Measurements]
    claims: tuple[Claim, ...]


def rates(ours: Measurements, raw: Measurements) -> float:
    """The ratio of two rates: of their medians.

    Raises:
        ValueError: the units differ, so the ratio would mean nothing.
    """
    if ours.unit != raw.unit:
        raise ValueError(f"a ratio of {ours.unit} and {raw.unit} means nothing: measure both sides in one unit")
    return ours.median / raw.median


def share(ours: Sequence[float], other: Sequence[float]) -> float:
    """The share of the other side that ours reached, measured round by round in turn: the median of the rounds' ratios.
    The machine may be twice as fast in one round as in the next, and either side then has its medians in rounds of its
    own."""
    return median(own / others for own, others in zip(ours, other, strict=True))


def serial_rate(rates_per_s: tuple[float, ...]) -> float:
    """The rate of parts that follow each other, each at its own rate: 1 / sum(1 / rate)."""
    return 1 / sum(1 / rate for rate in rates_per_s)


async def interleave(sides: Mapping[str, Side], effort: Effort) -> dict[str, tuple[float, ...]]:
    """Measure A B A B ..., so that a drift of the machine meets all sides alike; warm-up rounds are thrown away."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(effort.warmups + effort.repeats):
        for name, side in sides.items():
            rate = await side(round_number)
            if round_number >= effort.warmups:
                found[name].append(rate)
    return {name: tuple(values) for name, values in found.items()}
