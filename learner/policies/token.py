"""TokenPolicy: a (vision-)language model as a policy over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.attention.row_packing import RowPacking
from mobula.learner.policies.base import Policy, PolicyOutput
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families import family_of
from mobula.learner.policies.head import ScoringHead
from mobula.learner.policies.logprobs import Distribution, Steps


class TokenModel(Policy):
    """A model that is read at the states before a batch's targets.

    A subclass has the `forward`, which is the only way in. It reads `states` once, and that enters the vision tower
    exactly once, so that sharded parameters are gathered equally often on every rank: a batch without pictures shows
    the tower a blank one and adds it with weight 0. What enters the decoder is the model family's.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, *, packs: bool) -> None:
        """With `packs` the decoder computes rows without their padding (`learner.packing`)."""
        super().__init__()
        self.model = model
        self.family = family_of(model.config, model.config.name_or_path)
        if packs and not self.family.keeps_packed_rows_apart:
            raise ValueError(
                f"policy.model is of type {model.config.model_type}, whose layers run through rows that lie behind one "
                "another: set learner.packing=false"
            )
        self._packing = RowPacking(model) if packs else None

    def blocks(self) -> Iterator[nn.Module]:
        return (module for module in self.modules() if isinstance(module, GradientCheckpointingLayer))

    def states(self, batch: TokenBatch) -> Tensor:
        """[N, H]: the decoder's last state before each of the N targets, in the order of `batch.target_mask`."""
        with self._packing.rows(batch.places) if self._packing is not None else nullcontext():
            hidden = self.family.hidden_states(self.model, batch)  # [B, S, H]
        return hidden[batch.hidden_rows, batch.hidden_columns]


class TokenPolicy(TokenModel):
    """Scores targets given everything before them."""

    def __init__(self, model: PreTrainedModel, config: LearnerConfig) -> None:
        """From here on the model's output layer is a `ScoringHead`."""
        super().__init__(model, packs=config.packing)
        model.set_output_embeddings(ScoringHead(model.get_output_embeddings(), config.logprob_chunk_tokens))

    def forward(
        self, batch: TokenBatch, distribution: Distribution, *, entropy_has_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probs of the batch's targets under `distribution`; there are logits for a chunk of these at a time."""
        head = self.model.get_output_embeddings()
        targets = batch.targets[batch.hidden_rows, batch.target_columns]  # [N]
        steps = Steps(batch.target_columns == 0, batch.kept_ids, batch.kept_rows, batch.kept_ends)
        flat = head(self.states(batch), targets, distribution, entropy_has_gradient, steps)
        logprobs, entropy, is_argmax = map(batch.padded, flat)
        return PolicyOutput(logprobs, entropy, is_argmax)
