"""The loss and the metrics of a critic."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """The loss of each token, and where the clip holds its gradient back."""

    loss: Tensor  # [B, T]
    is_clipped: Tensor  # bool [B, T]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2 of each token; all [B, T]. A clip of 0 sets no
    bound.

    Source: the reference implementation of PPO, arXiv:1707.06347; Engstrom et al., arXiv:2005.12729, section 3.
    """
    plain = (values - returns).square()
    if clip == 0:
        return ValueLoss(plain / 2, torch.zeros_like(plain, dtype=torch.bool))
    moved = values - old_values
    clipped = (old_values + moved.clamp(-clip, clip) - returns).square()
    is_clipped = (moved.abs() > clip) & (clipped > plain)
    return ValueLoss(torch.where(is_clipped, clipped, plain) / 2, is_clipped)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - var(R - V) / var(R) over tokens [N], in float64; 0 where all returns are equal, NaN where one is not finite.

    1 is a perfect critic, 0 no better than a constant, and below 0 worse than that.
    """
    if not (np.isfinite(values).all() and np.isfinite(returns).all()):
        return math.nan
    if values.size == 0 or returns.min() == returns.max():
        return 0.0
    returns = returns.astype(np.float64)
    return float(1 - (returns - values).var() / returns.var())
