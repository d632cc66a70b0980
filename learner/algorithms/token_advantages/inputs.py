"""Inputs of token advantages (rewards, values and ends of one response), and their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class TokenValues:
    """One response of T tokens. Tokens that are not trained (of an environment, between turns) are no decisions."""

    rewards: np.ndarray  # float [T], after each token
    values: np.ndarray  # float [T + 1]: of the state before each token, and of the state after the last one
    mask: np.ndarray  # bool [T], trained tokens
    is_truncated: bool  # cut at the length limit: what would have followed is worth the last value, and else 0

    @property
    def end_value(self) -> float:
        """The value of what follows the last trained token."""
        return float(self.values[-1]) if self.is_truncated else 0.0


class TokenCredit(NamedTuple):
    """Both are 0 on tokens that are not trained."""

    advantages: np.ndarray  # float64 [T]
    returns: np.ndarray  # float64 [T], what the critic is trained on


TokenAdvantage = Callable[[TokenValues, float, float], TokenCredit]
"""`(response, gamma, gae_lambda)` to the credit of its tokens."""
