"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss, sequence_mean_of
from mobula.learner.algorithms.ratios import log_ratio


def gmpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-A exp(mean_t c_t) on every token, with d_t = logprobs - old_logprobs and

        c_t = min(d_t, clip_high) where A >= 0, max(d_t, -clip_low) where A < 0.

    The bounds are of the logarithm: 0.4 is the paper's range (e^-0.4, e^0.4). With `sequence_mean` this is the paper's
    mean over responses.

    Source: Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    difference = log_ratio(logprobs, old_logprobs)
    clipped = torch.where(advantages >= 0, difference.clamp(max=clip_high), difference.clamp(min=-clip_low))
    ratio = sequence_mean_of(clipped, mask).exp().expand_as(logprobs)
    return PolicyLoss(-ratio * advantages, ratio.detach(), (clipped != difference).detach())
