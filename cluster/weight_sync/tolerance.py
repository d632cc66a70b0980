"""Tolerance: how far log-probs of engine and learner may differ where both compute the same policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """A bound of the mean difference, and of the share of tokens that differ by more.

    In bfloat16 two kernels of one trained model differ by over 1 nat at some token, so the largest difference proves
    nothing there. In float32 no token may differ by more: the share is 0.
    """

    nat: float
    share: float

    def accepts(self, differences: np.ndarray) -> bool:
        """Whether these absolute differences are within the tolerance; a NaN is not."""
        is_beyond = ~(differences <= self.nat)
        return bool(differences.mean() <= self.nat and is_beyond.mean() <= self.share)

    def __str__(self) -> str:
        return f"weight_sync.canary_tolerance={self.nat:g}, canary_share={self.share:g}"


@dataclass(frozen=True)
class Gap:
    """Absolute log-prob differences of engine and learner, in nat."""

    mean: float
    max: float

    @classmethod
    def of(cls, differences: np.ndarray) -> Gap:
        return cls(float(differences.mean()), float(differences.max()))

    def __str__(self) -> str:
        return f"{self.mean:.3g} nat in the mean, {self.max:.3g} at most"
