"""What a learner trains, by `offline.job`: a policy over tokens, or a score model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from configs.schema import RunConfig
from learner.policies.loading import load_policy_model
from learner.policies.score_model import ScoreModel, load_score_model
from learner.policies.token import TokenModel, TokenPolicy


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
