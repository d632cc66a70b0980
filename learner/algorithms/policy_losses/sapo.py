"""SAPO: a smooth gate in the place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss
from mobula.learner.algorithms.ratios import log_ratio


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> PolicyLoss:
    """-(4 / k) sigmoid(k (r - 1)) A with r = exp(logprobs - old_logprobs), k the temperature for the sign of A.

    The gradient at r = 1 is that of r A, and falls off smoothly on both sides.

    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    positive, negative = torch.full_like(ratio, temperature_positive), torch.full_like(ratio, temperature_negative)
    temperature = torch.where(advantages > 0, positive, negative)
    gate = (temperature * (ratio - 1)).sigmoid() * 4 / temperature
    return PolicyLoss(-gate * advantages, ratio.detach(), torch.zeros_like(mask))
