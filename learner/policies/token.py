"""Models over tokens: TokenPolicy scores tokens, ScoreModel scores whole conversations."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from mobula.configs.schema import LearnerConfig, PolicyConfig
from mobula.learner.policies.attention.packed import RowPacking, RowPlaces
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import Policy, PolicyOutput, on_device
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.checkpoint import StoredWeights, unread_model, unread_policy_model
from mobula.learner.policies.families import family_of
from mobula.learner.policies.head import Distribution, ScoringHead, Steps
from mobula.learner.policies.loading import disable_dropout, freeze


class TokenModel(Policy):
    """A model that is read at the states before a batch's targets.

    A subclass implements `forward`, the only entry point, and computes `states` once. `states` runs the vision tower
    exactly once, so that sharded parameters are gathered equally often on every rank: a batch without images runs the
    tower on a blank image and adds the result with weight 0. The model family builds the decoder's inputs.
    """

    model: PreTrainedModel

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, sequence_ranks: SequenceRanks | None = None
    ) -> None:
        """Unless `learner.packing` is false, and with sequence parallelism, the decoder computes rows without padding;
        with `learner.share_prompts`, if the family allows it, each prefix that rows share once."""
        super().__init__()
        self.model = model
        self.family = family_of(model.config, model.config.name_or_path)
        if config.packing is not False and not self.family.keeps_packed_rows_apart:
            raise ValueError(
                f"policy.model is of type {model.config.model_type}, whose layers run through rows that lie behind one "
                "another: set learner.packing=false"
            )
        if sequence_ranks is not None and not self.family.keeps_packed_rows_apart:
            raise ValueError(
                f"policy.model is of type {model.config.model_type}, whose layers carry a state from token to token: "
                "set learner.sequence_parallel=1"
            )
        self._ranks = sequence_ranks
        self._shares = config.share_prompts and self.family.shares_prefixes
        is_packed = config.packing is not False or sequence_ranks is not None
        self._packing = RowPacking(model, sequence_ranks) if is_packed else None

    def states(self, batch: TokenBatch) -> Tensor:
        """Returns [N, H]: the decoder's last state before each target, in the order of `batch.target_mask`; with
        sequence parallelism, of `own_targets`."""
        if self._packing is None:
            return self.family.hidden_states(self.model, batch)[batch.hidden_rows, batch.hidden_columns]
        places = self._places(batch)
        with self._packing.rows(places):
            hidden = self.family.hidden_states(self.model, batch, self._ranks)[0]  # [num_tokens, H], or of this rank
        if self._ranks is None:
            return hidden.index_select(0, places.targets)
        own = places.targets[on_device(self.own_targets(batch, self._ranks), hidden.device)]
        return hidden.index_select(0, own - self._ranks.chunk(places.num_tokens).start)

    def own_targets(self, batch: TokenBatch, ranks: SequenceRanks) -> np.ndarray:
        """int64 [n]: the targets of the batch that this rank computes."""
        order, ends = self._owned(batch, ranks)
        return order[ranks.own(ends)]

    def padded(self, batch: TokenBatch, values: Tensor) -> Tensor:
        """[n] of this rank's targets -> [B, T] of all, 0 or False behind a row's last target."""
        if self._ranks is None:
            return batch.padded(values)
        order, ends = self._owned(batch, self._ranks)
        return batch.padded(self._ranks.gathered(values, ends)[on_device(order.argsort(), values.device)])

    def _owned(self, batch: TokenBatch, ranks: SequenceRanks) -> tuple[np.ndarray, list[int]]:
        places = self._places(batch)
        return ranks.owned(places.host_targets, places.num_tokens)

    def _places(self, batch: TokenBatch) -> RowPlaces:
        return batch.shared_places if self._shares else batch.places


class TokenPolicy(TokenModel):
    """Scores targets given all earlier tokens."""

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, sequence_ranks: SequenceRanks | None = None
    ) -> None:
        """From here on the model's output layer is a `ScoringHead`."""
        super().__init__(model, config, sequence_ranks)
        model.set_output_embeddings(ScoringHead(model.get_output_embeddings(), config.logprob_chunk_tokens))

    def forward(
        self, batch: TokenBatch, distribution: Distribution, *, entropy_has_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probs of the batch's targets under `distribution`; there are logits for a chunk of these at a time."""
        head = self.model.get_output_embeddings()
        targets = batch.targets[batch.hidden_rows, batch.target_columns]  # [N]
        steps = Steps(batch.target_columns == 0, batch.kept_ids, batch.kept_rows, batch.kept_ends)
        if self._ranks is not None:
            own = self.own_targets(batch, self._ranks)
            targets, steps = targets[on_device(own, targets.device)], steps.chosen(own)
        flat = head(self.states(batch), targets, distribution, entropy_has_gradient, steps)
        logprobs, entropy, is_argmax = (self.padded(batch, values) for values in flat)
        return PolicyOutput(logprobs, entropy, is_argmax)


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
