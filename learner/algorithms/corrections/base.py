"""Shared parts of corrections: the ratio of the proximal policy to the behaviour policy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mobula.learner.algorithms.ratios import bounded

CorrectionFunction = Callable[..., Tensor]
"""`(proximal_logprobs, behavior_logprobs, mask, **parameters)`, all [B, T], to constant weights [B, T] of the policy
loss; the parameters are those of `algorithm.corrections.NAME`. A weight of 0 rejects a token, which still counts where
a mean is taken: otherwise the kept tokens would grow with the share that is rejected.
"""


def token_ratio(proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """exp(proximal - behaviour) [B, T], a constant. A difference that is not finite counts as none."""
    return bounded(_difference(proximal_logprobs, behavior_logprobs)).exp()


def sequence_ratio(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(sum over the row's trained tokens of proximal - behaviour) [B, T], a constant."""
    difference = _difference(proximal_logprobs, behavior_logprobs)
    total = torch.where(mask, difference, 0.0).sum(dim=1, keepdim=True)
    return bounded(total).exp().expand_as(difference)


def _difference(proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    return torch.nan_to_num(proximal_logprobs - behavior_logprobs, nan=0.0, posinf=0.0, neginf=0.0).detach()
