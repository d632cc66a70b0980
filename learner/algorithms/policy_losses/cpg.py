"""CPG, the loss of CPGD: a policy gradient whose log-ratio is clipped, without the ratio as a factor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss
from mobula.learner.algorithms.ratios import log_ratio


def cpg(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    drift: float,
) -> PolicyLoss:
    """-min(d A, clip(d, log(1 - clip_low), log(1 + clip_high)) A) + drift (exp(d) - 1 - d).

    With d = logprobs - old_logprobs. The gradient of the first term inside the range is -A, however large the ratio is:
    a ratio above 1 amplifies nothing. The second term estimates KL(old policy || policy) from samples of the old one.

    Source: CPGD, arXiv:2505.12504.
    """
    difference = log_ratio(logprobs, old_logprobs)
    free = difference * advantages
    clipped = difference.clamp(math.log1p(-clip_low), math.log1p(clip_high)) * advantages
    drifted = drift * (difference.expm1() - difference)
    return PolicyLoss(drifted - torch.minimum(free, clipped), difference.detach().exp(), (clipped < free).detach())
