"""Cross-entropy of given targets with a weight for each."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """-weights * logprobs, any shape.

    Its gradient by the log-probs is -weights: weights of -dC/dlogprobs give the gradient of any loss C.

    Source: the Tinker API, https://tinker-docs.thinkingmachines.ai/losses.
    """
    return -weights * logprobs
