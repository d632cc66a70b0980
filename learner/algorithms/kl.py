"""Estimators of KL(policy || reference) from samples of the policy, a token: [B, T], [B, T] -> [B, T].

Source of all three: Schulman, Approximating KL Divergence, joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

MAX_LOG_RATIO = 20.0  # keeps the exponential finite where the two policies share no mass


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, high variance, may be negative."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance; as a loss its gradient is that of the KL."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, low variance, never negative; GRPO's choice (arXiv:2402.03300, equation 4)."""
    log_ratio = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
