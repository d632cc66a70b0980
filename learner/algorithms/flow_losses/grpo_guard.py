"""GRPO-Guard: the clipped ratio of denoising steps, normalised so that the clip bites equally at every step."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss, clipped_surrogate
from mobula.learner.algorithms.ratios import log_ratio


def grpo_guard(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    std: Tensor,
    length: Tensor,
    drift: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / length, with r = exp(std (logprobs - old_logprobs + drift)).

    The log-ratio of a Gaussian has a mean below 0, which differs by step: `drift`, the mean of (mean - old mean)^2 /
    (2 std^2), takes it away. `std` gives the rest one scale, and `length`, what a step takes off the noise level,
    gives steps of different lengths one weight. All are [B, T].

    Source: GRPO-Guard, arXiv:2510.22319.
    """
    ratio = (std * (log_ratio(logprobs, old_logprobs) + drift)).exp()
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate._replace(loss=surrogate.loss / length)
