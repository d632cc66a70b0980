"""The k1 estimator of the KL divergence."""

from __future__ import annotations

from torch import Tensor


def k1(logprobs: Tensor, reference_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, high variance, may be negative. As a loss its expected gradient is 0."""
    return logprobs - reference_logprobs
