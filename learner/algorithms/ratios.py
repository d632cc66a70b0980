"""Ratios of two policies at the sampled tokens, from their log-probs."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is far outside every clip range and still finite


def bounded(values: Tensor) -> Tensor:
    """Log-ratios held within -MAX_LOG_RATIO and MAX_LOG_RATIO, so that their exponential is finite."""
    return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """logprobs - other_logprobs, bounded. Any shape."""
    return bounded(logprobs - other_logprobs)
