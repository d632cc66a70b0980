"""The type of KL estimators, and a bound on their values."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

KLEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(logprobs, reference_logprobs, behavior_logprobs)`, all [B, T], to KL(policy || reference) a token [B, T]. Tokens
were sampled by the behaviour policy. The first three estimators are those of Schulman, Approximating KL Divergence,
joschu.net/blog/kl-approx.html; they read no behaviour log-probs.
"""


def capped(kl: Tensor, cap: float) -> Tensor:
    """Token values held within -cap and cap; a cap of 0 sets no bound."""
    return kl.clamp(-cap, cap) if cap > 0 else kl
