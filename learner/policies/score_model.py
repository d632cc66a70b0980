"""ScoreModel: a (vision-)language model that scores a whole conversation with a scalar."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from mobula.configs.schema import PolicyConfig
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.checkpoint.reading import StoredWeights, unread_model, unread_policy_model
from mobula.learner.policies.loading import disable_dropout, freeze
from mobula.learner.policies.token import TokenModel


class ScoreModel(TokenModel):
    """A sequence classifier of transformers with one label, read at the state before each target.

    The score of a conversation is read at the last token: a row has one target after that token, which is not read.
    """

    def forward(self, batch: TokenBatch) -> Tensor:
        """float32 [B, T]: the score at the state before each target; 0 behind a row's last target."""
        scores = self.model.get_submodule("score")(self.states(batch)).float()[:, 0]  # [N]
        return self.padded(batch, scores)


def unread_score_model(config: PolicyConfig, dtype: torch.dtype, seed: int) -> tuple[PreTrainedModel, StoredWeights]:
    """Builds the backbone of `policy.model` with a score head on the meta device, with frozen parameters marked; also
    returns the weights.

    A checkpoint of a reward model keeps its head. A new head starts from N(0, 1 / (H + 1)^2), the same on every rank.
    Source: Learning to Summarize from Human Feedback, arXiv:2009.01325, appendix B.1.
    """
    classifier = score_class(config.model)
    if classifier is None:
        model, weights = unread_policy_model(config, dtype)
        model = _with_new_head(model, classifier_class(type(model.config)), seed)
    else:
        model, weights = unread_model(config.model, dtype, config.attention, classifier)
        if model.num_labels != 1:
            raise ValueError(
                f"policy.model={config.model} is a {classifier.__name__} with {model.num_labels} labels: name a reward "
                "model with one label, or a language model"
            )
        freeze(model, config.freeze)
    if not config.dropout:
        disable_dropout(model)
    return model, weights


def score_class(source: str | Path) -> Any:
    """The class of the reward model at `source`; None if it holds a language model."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    classifier = classifier_class(type(config))
    return classifier if classifier.__name__ in (config.architectures or ()) else None


def _with_new_head(language_model: PreTrainedModel, classifier: Any, seed: int) -> PreTrainedModel:
    """A classifier around the backbone of `language_model`."""
    settings = deepcopy(language_model.config)
    settings.num_labels, settings.architectures = 1, [classifier.__name__]
    settings._attn_implementation = language_model.config._attn_implementation  # of all parts: see `pack_windows`
    with torch.device("meta"):
        model = classifier(settings)
    model.model = language_model.model
    shape = model.score.weight.shape
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / (shape[1] + 1)
    model.score = nn.Linear(shape[1], 1, bias=False, dtype=language_model.dtype)
    model.score.weight.data.copy_(drawn)
    return model


_MADE: dict[type, type] = {}  # configuration -> classifier, for architectures without one in transformers


def classifier_class(config_class: type) -> Any:
    """Transformers' sequence classifier of an architecture; if there is none, the base model with a `score` head.

    The reward function `reward_model` loads checkpoints of the same classes.
    """
    if config_class in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[config_class]
    if config_class in _MADE:
        return _MADE[config_class]
    base = MODEL_MAPPING[config_class]
    assert isinstance(base, type), f"{config_class.__name__} has several models"
    family = next(c for c in base.__mro__[1:] if issubclass(c, PreTrainedModel))
    name = f"{base.__name__.removesuffix('Model')}ForSequenceClassification"
    return _MADE.setdefault(config_class, type(name, (GenericForSequenceClassification, family), {}))
