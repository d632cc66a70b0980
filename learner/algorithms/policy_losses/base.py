"""Shared parts of policy losses: their result, and ratios of the trained policy to the old one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """A policy loss, token by token. What lies outside the mask may be anything."""

    loss: Tensor  # [B, T]
    ratio: Tensor  # [B, T], detached
    is_clipped: Tensor  # bool [B, T]: the clip holds the gradient of this token back


PolicyLossFunction = Callable[..., PolicyLoss]
"""`(logprobs, old_logprobs, advantages, mask, **parameters)`, all [B, T]; the parameters are those of
`algorithm.losses.NAME`. `logprobs` are of the trained policy, `old_logprobs` of the policy that the ratio is taken
to; `mask` is True on trained tokens.
"""


def sequence_mean_of(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's trained tokens, [B, T] -> [B, 1]; 0 for a row without any."""
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True) / lengths


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(-torch.minimum(free, clipped), ratio.detach(), (clipped < free).detach())
