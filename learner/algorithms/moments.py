"""Mean and standard deviation of all rewards that a run has trained on so far."""

from __future__ import annotations

import math

from torch import Tensor

LEAST_STD = 1e-4  # below it rewards are as good as constant, and dividing by it would only amplify rounding


class RunningMoments:
    """Merges batch after batch, in float64.

    Source: Chan, Golub, LeVeque 1983, doi:10.1080/00031305.1983.10483115.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.sum_of_squares = 0.0  # of deviations from the mean

    @property
    def scale(self) -> float:
        """The standard deviation (n - 1), or 1 while it is not known or below LEAST_STD."""
        if self.count < 2:
            return 1.0
        std = math.sqrt(self.sum_of_squares / (self.count - 1))
        return std if std >= LEAST_STD else 1.0

    def add(self, values: Tensor) -> None:
        """Merge a batch [N]; values that are not finite are left out."""
        chosen = values[values.isfinite()].double()
        num = chosen.numel()
        if num == 0:
            return
        mean = chosen.mean().item()
        squares = (chosen - mean).square().sum().item()
        total = self.count + num
        distance = mean - self.mean
        self.sum_of_squares += squares + distance * distance * self.count * num / total
        self.mean += distance * num / total
        self.count = total

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "sum_of_squares": self.sum_of_squares}

    def load(self, state: dict[str, float]) -> None:
        self.count = int(state["count"])
        self.mean, self.sum_of_squares = state["mean"], state["sum_of_squares"]
