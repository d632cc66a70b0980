"""What advantages of tokens read: rewards, values and ends of one response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenValues:
    """One response of T tokens. Tokens that are not trained (of an environment, between turns) are no decisions."""

    rewards: np.ndarray  # float [T], after each token
    values: np.ndarray  # float [T + 1]: of the state before each token, and of the state after the last one
    mask: np.ndarray  # bool [T], trained tokens
    is_truncated: bool  # cut at the length limit: what would have followed is worth the last value, and else 0


TokenAdvantage = Callable[[TokenValues, float, float], np.ndarray]
"""`(response, gamma, gae_lambda)` to advantages, float64 [T]; 0 on tokens that are not trained. The return that the
critic is trained on is the advantage plus the value.
"""
