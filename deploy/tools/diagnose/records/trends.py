"""Trends of a curve and agreement of answers with labels, with standard errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_POINTS = 8  # of a curve, for a trend
SURE = 3.0  # standard errors


@dataclass(frozen=True)
class Trend:
    """Means of the first and the last quarter of a curve, and their difference in standard errors."""

    first: float
    last: float
    z: float
    num: int

    @property
    def rises(self) -> bool:
        return self.z > SURE

    @property
    def falls(self) -> bool:
        return self.z < -SURE

    @classmethod
    def of(cls, values: Sequence[float]) -> Trend | None:
        """Returns the trend of a curve; None if it has fewer than `MIN_POINTS` finite values."""
        finite = np.array([value for value in values if math.isfinite(value)])
        if len(finite) < MIN_POINTS:
            return None
        size = max(3, len(finite) // 4)
        first, last = finite[:size], finite[-size:]
        error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / size)
        difference = float(last.mean() - first.mean())
        z = difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0
        return cls(float(first.mean()), float(last.mean()), z, len(finite))


@dataclass(frozen=True)
class Agreement:
    """Agreement of answers with labels beyond chance.

    `observed` is the share of answers that equal their label, `expected` the share if answers were dealt to prompts at
    random, `kappa` Cohen's (observed - expected) / (1 - expected), `error` its standard error over prompts.

    Source: A Coefficient of Agreement for Nominal Scales, doi:10.1177/001316446002000104.
    """

    observed: float
    expected: float
    kappa: float
    error: float
    num_prompts: int

    @classmethod
    def of(cls, prompts: Sequence[tuple[str, Sequence[str]]]) -> Agreement | None:
        """Returns the agreement of (label, answers) pairs; None with one label or without prompts."""
        labels = Counter(label for label, _ in prompts)
        answers = Counter(answer for _, given in prompts for answer in given)
        if len(labels) < 2 or not answers:
            return None
        num_answers = sum(answers.values())
        expected = sum(num / len(prompts) * answers[label] / num_answers for label, num in labels.items())
        shares = np.array([sum(a == label for a in given) / len(given) for label, given in prompts if given])
        observed = float(shares.mean())
        error = float(shares.std(ddof=1) / math.sqrt(len(shares))) if len(shares) > 1 else math.nan
        scale = 1 - expected
        return cls(observed, expected, (observed - expected) / scale, error / scale, len(shares))
