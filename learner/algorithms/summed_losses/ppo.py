"""PPO's clipped surrogate, with the bounds of the ratio as thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.ratios import log_ratio


def ppo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Tensor:
    """-min(r A, clip(r, low, high) A) with r = exp(logprobs - sampling_logprobs), any shape.

    The thresholds bound the ratio itself; `policy_losses.ppo_clip` takes distances from 1. Their defaults are those of
    the API. The log-ratio is held within -20 and 20.

    Source: PPO, arXiv:1707.06347, equation 7; the Tinker API, https://tinker-docs.thinkingmachines.ai/losses.
    """
    ratio = log_ratio(logprobs, sampling_logprobs).exp()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * advantages, clipped * advantages)
