"""The k3 estimator of the KL divergence, and its unbiased form for samples of another policy."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.ratios import log_ratio


def k3(logprobs: Tensor, reference_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, low variance, never negative; GRPO's choice (arXiv:2402.03300, equation 4)."""
    difference = log_ratio(reference_logprobs, logprobs)
    return difference.expm1() - difference


def k3_importance(logprobs: Tensor, reference_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """p/b (q/p - 1 - log(q/p)): k3 for tokens that policy b sampled. The gradient goes through p/b too, so that value
    and gradient are both unbiased.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    weight = log_ratio(logprobs, behavior_logprobs).exp()
    return weight * k3(logprobs, reference_logprobs, behavior_logprobs)
