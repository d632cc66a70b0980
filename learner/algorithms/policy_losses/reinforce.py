"""REINFORCE: the plain policy gradient, without a ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss
from mobula.learner.algorithms.ratios import log_ratio


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """-A logprobs. Source: Williams, 1992, doi:10.1007/BF00992696."""
    ratio = log_ratio(logprobs, old_logprobs).detach().exp()
    return PolicyLoss(-advantages * logprobs, ratio, torch.zeros_like(mask))
