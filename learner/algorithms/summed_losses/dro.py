"""DRO: a policy gradient with a squared penalty on the log-ratio."""

from __future__ import annotations

from torch import Tensor


def dro(logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, *, beta: float) -> Tensor:
    """-(A logprobs - beta / 2 * (logprobs - sampling_logprobs)^2), any shape.

    Source: DRO, arXiv:2405.19107, token by token with a given advantage; the Tinker API,
    https://tinker-docs.thinkingmachines.ai/losses.
    """
    return -(advantages * logprobs - 0.5 * beta * (logprobs - sampling_logprobs) ** 2)
