"""The coefficient of the KL term: fixed, or adapted towards a target."""

from __future__ import annotations

from typing import Protocol

MAX_ERROR = 0.2  # of the relative error that one step answers to


class KLCoefficient(Protocol):
    """Interface of KL coefficients."""

    value: float

    def observe(self, kl: float, num_responses: int) -> None:
        """Updates the coefficient with the KL (nat per token) of one step of `num_responses` responses."""
        ...


class FixedCoefficient:
    """A constant coefficient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def observe(self, kl: float, num_responses: int) -> None:
        """Ignores the KL."""


class AdaptiveCoefficient:
    """value <- value (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) after a step of n responses.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, value: float, *, target: float, horizon: float) -> None:
        self.value = value
        self._target = target
        self._horizon = horizon

    def observe(self, kl: float, num_responses: int) -> None:
        error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        self.value *= 1 + error * num_responses / self._horizon
