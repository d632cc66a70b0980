"""TokenPolicy: a (vision-)language model as a policy over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.attention.row_packing import RowPacking
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import Policy, PolicyOutput
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families import family_of
from mobula.learner.policies.head import ScoringHead
from mobula.learner.policies.logprobs import Distribution, Steps


class TokenModel(Policy):
    """A model that is read at the states before a batch's targets.

    A subclass implements `forward`, the only entry point, and computes `states` once. `states` runs the vision tower
    exactly once, so that sharded parameters are gathered equally often on every rank: a batch without images runs the
    tower on a blank image and adds the result with weight 0. The model family builds the decoder's inputs.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, *, packs: bool, sequence_ranks: SequenceRanks | None = None) -> None:
        """With `packs` (`learner.packing`) or sequence parallelism, the decoder computes rows without padding."""
        super().__init__()
        self.model = model
        self.family = family_of(model.config, model.config.name_or_path)
        if packs and not self.family.keeps_packed_rows_apart:
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
        self._packing = RowPacking(model, sequence_ranks) if packs or sequence_ranks is not None else None

    def blocks(self) -> Iterator[nn.Module]:
        return (module for module in self.modules() if isinstance(module, GradientCheckpointingLayer))

    def states(self, batch: TokenBatch) -> Tensor:
        """Returns [N, H]: the decoder's last state before each target, in the order of `batch.target_mask`; with
        sequence parallelism, of `own_targets`.
        """
        with self._packing.rows(batch.places) if self._packing is not None else nullcontext():
            hidden = self.family.hidden_states(self.model, batch, self._ranks)  # [B, S, H]
        if self._ranks is None:
            return hidden[batch.hidden_rows, batch.hidden_columns]
        own, first = self.own_targets(batch), self._ranks.chunk(sum(batch.row_lengths)).start
        return hidden[0].index_select(0, batch.target_places[own] - first)

    def own_targets(self, batch: TokenBatch) -> slice:
        """The targets of the batch that this rank computes."""
        return slice(None) if self._ranks is None else self._ranks.own(self._ends(batch, self._ranks))

    def padded(self, batch: TokenBatch, values: Tensor) -> Tensor:
        """[n] of this rank's targets -> [B, T] of all, 0 or False behind a row's last target."""
        whole = values if self._ranks is None else self._ranks.gathered(values, self._ends(batch, self._ranks))
        return batch.padded(whole)

    @staticmethod
    def _ends(batch: TokenBatch, ranks: SequenceRanks) -> list[int]:
        return ranks.ends(batch.host_target_places, sum(batch.row_lengths))


class TokenPolicy(TokenModel):
    """Scores targets given all earlier tokens."""

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, sequence_ranks: SequenceRanks | None = None
    ) -> None:
        """From here on the model's output layer is a `ScoringHead`."""
        super().__init__(model, packs=config.packing, sequence_ranks=sequence_ranks)
        model.set_output_embeddings(ScoringHead(model.get_output_embeddings(), config.logprob_chunk_tokens))

    def forward(
        self, batch: TokenBatch, distribution: Distribution, *, entropy_has_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probs of the batch's targets under `distribution`; there are logits for a chunk of these at a time."""
        head = self.model.get_output_embeddings()
        own = self.own_targets(batch)
        targets = batch.targets[batch.hidden_rows[own], batch.target_columns[own]]  # [N]
        steps = Steps(batch.target_columns == 0, batch.kept_ids, batch.kept_rows, batch.kept_ends)
        steps = steps if self._ranks is None else steps.part(own)
        flat = head(self.states(batch), targets, distribution, entropy_has_gradient, steps)
        logprobs, entropy, is_argmax = (self.padded(batch, values) for values in flat)
        return PolicyOutput(logprobs, entropy, is_argmax)
