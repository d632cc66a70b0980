"""REINFORCE with the ratio to the sampling policy."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.ratios import log_ratio


def importance_sampling(logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-r A with r = exp(logprobs - sampling_logprobs), any shape. The log-ratio is held within -20 and 20.

    Source: the Tinker API, https://tinker-docs.thinkingmachines.ai/losses.
    """
    return -log_ratio(logprobs, sampling_logprobs).exp() * advantages
