"""Losses that only flow models have, one formula a file; `algorithm.loss` chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mobula.learner.algorithms.flow_losses.grpo_guard import grpo_guard
from mobula.learner.algorithms.flow_losses.nft import nft
from mobula.learner.algorithms.policy_losses.base import PolicyLoss

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

__all__ = ["FLOW_LOSSES", "FlowLoss", "Reads", "grpo_guard", "nft"]
