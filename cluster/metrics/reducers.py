"""Means with their uncertainty, and running means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """A mean over `num` observations with its 95 % interval [low, high]."""

    mean: float
    low: float
    high: float
    num: int


def wilson(num_correct: float, num: int) -> Estimate:
    """Returns a share of `num` trials with Wilson's score interval, which stays in [0, 1] and is valid at 0 and 1.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n); Wilson (1927).
    """
    if num < 1 or not 0 <= num_correct <= num:
        raise ValueError(f"an accuracy needs 0 <= correct <= num and num >= 1, got {num_correct:g} of {num}")
    share = num_correct / num
    scale = 1 + Z95**2 / num
    centre = (share + Z95**2 / (2 * num)) / scale
    half = Z95 * math.sqrt(share * (1 - share) / num + Z95**2 / (4 * num**2)) / scale
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half), num)


def standard_deviation(values: Sequence[float]) -> float:
    """Population standard deviation."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


class WeightedMean:
    """A running weighted mean. With the number of observations as weight it is the mean over all observations."""

    def __init__(self) -> None:
        self._total = 0.0
        self._weight = 0.0

    def add(self, value: float, weight: float) -> None:
        self._total += value * weight
        self._weight += weight

    @property
    def value(self) -> float | None:
        """Mean so far; None before the first observation."""
        return self._total / self._weight if self._weight > 0 else None
