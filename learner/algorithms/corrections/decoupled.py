"""Decoupled PPO: the whole importance weight of the proximal policy."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.corrections.base import token_ratio


def decoupled(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """w = p_prox / b, without a bound; the clip of the loss is around p_prox.

    Source: AReaL, arXiv:2505.24298, section 5.2; Batch Size-Invariance for Policy Optimization, arXiv:2110.00641.
    """
    return token_ratio(proximal_logprobs, behavior_logprobs)
