"""Dual clip: PPO's surrogate with a bound on the loss of bad tokens that have become likely."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss
from mobula.learner.algorithms.policy_losses.ppo_clip import ppo_clip


def dual_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    bound: float,
) -> PolicyLoss:
    """PPO's loss; where A < 0, at most -bound * A.

    Source: Mastering Complex Control in MOBA Games, arXiv:1912.09729.
    """
    once = ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    most = -bound * advantages
    is_bounded = (advantages < 0) & (once.loss > most)
    loss = torch.where(is_bounded, most, once.loss)
    return PolicyLoss(loss, once.ratio, once.is_clipped | is_bounded.detach())
