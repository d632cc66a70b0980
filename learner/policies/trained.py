"""What a learner trains, by `offline.job` (a policy or a score model), and the rows that it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers import PreTrainedModel

from cluster.records.actions import Actions, LatentActions, TokenActions
from cluster.records.media import MediaReader
from cluster.records.trajectory import Prompt
from configs.schema import RunConfig
from learner.policies.base import PolicyRow
from learner.policies.batch import TokenBatch, TokenSequence, collate
from learner.policies.flow.rows import LatentBatch, LatentSequence, collate_latents
from learner.policies.loading import load_policy_model
from learner.policies.score_model import ScoreModel, load_score_model
from learner.policies.token import TokenModel, TokenPolicy

PolicyBatch = TokenBatch | LatentBatch
"""Rows as the forward of their policy takes them."""


def load_trained_model(config: RunConfig) -> PreTrainedModel:
    """The model in float32 on the CPU, frozen parameters marked."""
    if config.offline.job == "reward_model":
        return load_score_model(config.policy, torch.float32, config.seed)
    return load_policy_model(config.policy, torch.float32)


def as_policy(model: PreTrainedModel, config: RunConfig) -> TokenModel:
    """The module whose forward a learner calls."""
    if config.offline.job == "reward_model":
        return ScoreModel(model, packs=config.learner.packing)
    return TokenPolicy(model, config.learner)


def row_of(prompt: Prompt, actions: Actions) -> PolicyRow:
    """A prompt and what the policy did after it, as a row to score."""
    if isinstance(actions, TokenActions):
        return TokenSequence.of_response(prompt, actions.token_ids)
    assert isinstance(actions, LatentActions)
    return LatentSequence.of_response(prompt, actions)


def collate_rows(rows: Sequence[PolicyRow], reader: MediaReader, device: torch.device) -> PolicyBatch:
    """Rows of one kind as a batch, with their media."""
    if isinstance(rows[0], LatentSequence):
        return collate_latents(cast(Sequence[LatentSequence], rows), reader, device)
    return collate(cast(Sequence[TokenSequence], rows), reader, device)
