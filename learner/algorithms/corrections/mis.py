"""Masked importance sampling: responses on which the two policies differ too much are rejected."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.corrections.base import sequence_ratio


def mis(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """w = prod_t p_prox / b on every token of a response where that is at most `cap`, else 0.

    Source: Liu et al. 2025, When Speed Kills Stability.
    """
    ratio = sequence_ratio(proximal_logprobs, behavior_logprobs, mask)
    return torch.where(ratio <= cap, ratio, 0.0)
