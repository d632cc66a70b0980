"""Truncated importance sampling, token by token."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.corrections.base import token_ratio


def tis_token(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """w_t = min(p_prox / b, cap).

    Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
    fengyao.notion.site/off-policy-rl.
    """
    return token_ratio(proximal_logprobs, behavior_logprobs).clamp(max=cap)
