"""The critic: a value model with an optimizer of its own."""

from __future__ import annotations

import torch

from mobula.cluster.records.media import MediaReader
from mobula.configs.schema import RunConfig
from mobula.learner.critic.critic import Critic, NullCritic


def build_critic(
    config: RunConfig, rank: int, world_size: int, reader: MediaReader, device: torch.device
) -> Critic | NullCritic:
    """The critic of `algorithm.critic`, on one rank of the learner; one with ranks of its own is not here."""
    if config.algorithm.critic.place != "learner_ranks":
        return NullCritic()
    return Critic(config, rank, world_size, reader, device)
