"""The critic: a value model with an optimizer of its own, trained on the learner's ranks."""

from __future__ import annotations

import torch

from cluster.records.media import MediaReader
from configs.schema import RunConfig
from learner.critic.critic import Critic, NullCritic


def build_critic(
    config: RunConfig, rank: int, world_size: int, reader: MediaReader, device: torch.device
) -> Critic | NullCritic:
    """The critic of `algorithm.critic`, on one rank."""
    if not config.algorithm.critic.is_on:
        return NullCritic()
    return Critic(config, rank, world_size, reader, device)
