"""Losses of the training service: sums over tokens, by the name in a request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses import log_ratio


@dataclass(frozen=True)
class SummedLoss:
    """A loss that is summed over the tokens of a call, not averaged.

    `formula` takes log-probs of the targets and the `inputs`, all of one shape, and keyword-only options. It returns
    the loss of each token.
    """

    inputs: tuple[str, ...]
    formula: Callable[..., Tensor]
    takes_several_targets: bool = False  # K targets at a position, with K values of every input

    @property
    def options(self) -> dict[str, bool]:
        """Option -> whether a call must set it."""
        parameters = inspect.signature(self.formula).parameters.values()
        return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}

    def __call__(self, logprobs: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
        """Returns the loss of each token, in the shape of `logprobs`."""
        return self.formula(logprobs, *(inputs[name] for name in self.inputs), **options)


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """-weights * logprobs, any shape.

    Its gradient by the log-probs is -weights: weights of -dC/dlogprobs give the gradient of any loss C.

    Source: the Tinker API, https://tinker-docs.thinkingmachines.ai/losses.
    """
    return -weights * logprobs


def importance_sampling(logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-r A with r = exp(logprobs - sampling_logprobs), any shape. The log-ratio is held within -20 and 20.

    Source: the Tinker API, https://tinker-docs.thinkingmachines.ai/losses.
    """
    return -log_ratio(logprobs, sampling_logprobs).exp() * advantages


def ppo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Tensor:
    """-min(r A, clip(r, low, high) A) with r = exp(logprobs - sampling_logprobs), any shape.

    The thresholds bound the ratio itself; `policy_losses.ppo_clip` takes distances from 1. Their defaults are those of
    the API. The log-ratio is held within -20 and 20.

    Source: PPO, arXiv:1707.06347, equation 7; the Tinker API, https://tinker-docs.thinkingmachines.ai/losses.
    """
    ratio = log_ratio(logprobs, sampling_logprobs).exp()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * advantages, clipped * advantages)


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


def dro(logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, *, beta: float) -> Tensor:
    """-(A logprobs - beta / 2 * (logprobs - sampling_logprobs)^2), any shape.

    Source: DRO, arXiv:2405.19107, token by token with a given advantage; the Tinker API,
    https://tinker-docs.thinkingmachines.ai/losses.
    """
    return -(advantages * logprobs - 0.5 * beta * (logprobs - sampling_logprobs) ** 2)


OF_POLICY = ("logprobs", "advantages")  # log-probs of the sampling policy

SUMMED_LOSSES: dict[str, SummedLoss] = {
    "cross_entropy": SummedLoss(("weights",), cross_entropy, takes_several_targets=True),
    "importance_sampling": SummedLoss(OF_POLICY, importance_sampling),
    "ppo": SummedLoss(OF_POLICY, ppo),
    "cispo": SummedLoss(OF_POLICY, cispo),
    "dro": SummedLoss(OF_POLICY, dro),
}
