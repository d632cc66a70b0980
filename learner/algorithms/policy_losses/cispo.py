"""CISPO: REINFORCE weighted by a clipped constant ratio, so that no token loses its gradient."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss
from mobula.learner.algorithms.ratios import log_ratio


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs with r = exp(logprobs - old_logprobs).

    `clip_low=1` sets no lower bound, as in the paper.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight * advantages * logprobs, ratio, weight != ratio)
