"""Losses that only flow models have, by the name in `algorithm.loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses import PolicyLoss, clipped_surrogate, log_ratio


def grpo_guard(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    std: Tensor,
    length: Tensor,
    drift: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / length, with r = exp(std (logprobs - old_logprobs + drift)).

    The log-ratio of a Gaussian has a mean below 0, which differs by step: `drift`, the mean of (mean - old mean)^2 /
    (2 std^2), takes it away. `std` gives the rest one scale, and `length`, what a step takes off the noise level,
    gives steps of different lengths one weight. All are [B, T].

    Source: GRPO-Guard, arXiv:2510.22319.
    """
    ratio = (std * (log_ratio(logprobs, old_logprobs) + drift)).exp()
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate._replace(loss=surrogate.loss / length)


ERROR_FLOOR = 1e-5  # of the mean absolute error that squared errors are divided by


def nft(
    predicted: Tensor,
    old: Tensor,
    noised: Tensor,
    clean: Tensor,
    sigmas: Tensor,
    advantages: Tensor,
    *,
    beta: float,
    max_advantage: float,
) -> PolicyLoss:
    """A_max (rho E(v+) + (1 - rho) E(v-)) / beta, a mean over K levels; [B, 1].

        v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v
        rho = clip(A / (2 A_max) + 1/2, 0, 1)
        E(w) = mean (x - sigma w - clean)^2 / sg(mean |x - sigma w - clean|)

    All of the image counts in the means of E. `predicted`, `old`, `noised` and `clean` are [B, K, ...], `sigmas` [B,
    K, 1, ...], `advantages` [B, 1]. The ratio that is reported is 1: there is none.

    Source: DiffusionNFT, arXiv:2509.16117.
    """
    share = (advantages / (2 * max_advantage) + 0.5).clamp(0, 1)
    positive = beta * predicted + (1 - beta) * old
    negative = (1 + beta) * old - beta * predicted
    good, bad = (_error(noised - sigmas * velocity - clean) for velocity in (positive, negative))  # [B, K]
    loss = max_advantage / beta * (share * good + (1 - share) * bad).mean(dim=1, keepdim=True)
    return PolicyLoss(loss, torch.ones_like(loss), advantages.abs() > max_advantage)


def _error(difference: Tensor) -> Tensor:
    """[B, K, ...] -> [B, K]"""
    flat = difference.flatten(2)
    return flat.square().mean(-1) / flat.detach().abs().mean(-1).clamp(min=ERROR_FLOOR)


Reads = Literal["moves", "velocities"]


@dataclass(frozen=True)
class FlowLoss:
    """A loss, and what it reads of a policy's output (`mobula.learner.policies.base.PolicyOutput`)."""

    function: Callable[..., PolicyLoss]
    reads: Reads
    parameters: tuple[str, ...]  # those of `algorithm.losses.NAME` that it takes

    def given(self, parameters: Mapping[str, Any]) -> Callable[..., PolicyLoss]:
        """The loss with its parameters among those of `algorithm.losses.NAME`."""
        return partial(self.function, **{name: parameters[name] for name in self.parameters})


FLOW_LOSSES = {
    "nft": FlowLoss(nft, reads="velocities", parameters=("beta", "max_advantage")),
    "grpo_guard": FlowLoss(grpo_guard, reads="moves", parameters=("clip_low", "clip_high")),
}
