"""CISPO: log-probs weighted by a clipped constant ratio, with the bounds of the ratio as thresholds."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.ratios import log_ratio


def cispo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> Tensor:
    """-sg(clip(r, low, high)) A logprobs with r = exp(logprobs - sampling_logprobs), any shape.

    The thresholds bound the ratio itself; `policy_losses.cispo` takes distances from 1. Their defaults are those of
    the API, without a lower bound.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5; the Tinker API,
    https://tinker-docs.thinkingmachines.ai/losses.
    """
    ratio = log_ratio(logprobs, sampling_logprobs).exp().detach()
    return -ratio.clamp(clip_low_threshold, clip_high_threshold) * advantages * logprobs
