"""Truncated importance sampling, response by response."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.corrections.base import sequence_ratio


def tis_sequence(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """w = min(prod_t p_prox / b, cap) on every token of a response.

    Source: Liu et al. 2025, When Speed Kills Stability.
    """
    return sequence_ratio(proximal_logprobs, behavior_logprobs, mask).clamp(max=cap)
