"""PPO's clipped surrogate, with a bound of its own on each side."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss, clipped_surrogate
from mobula.learner.algorithms.ratios import log_ratio


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    Source: PPO, arXiv:1707.06347, equation 7; two clip bounds: DAPO, arXiv:2503.14476, section 3.1.
    """
    return clipped_surrogate(log_ratio(logprobs, old_logprobs).exp(), advantages, clip_low, clip_high)
