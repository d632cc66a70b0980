"""IcePop: tokens on which the two policies differ too much are rejected."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.corrections.base import token_ratio


def icepop(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """w_t = p_prox / b where that is within [low, high], else 0.

    Source: Every Step Evolves (Ring-1T), arXiv:2510.18855.
    """
    ratio = token_ratio(proximal_logprobs, behavior_logprobs)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
