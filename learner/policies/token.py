"""TokenPolicy: a (vision-)language model as a policy over tokens."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.attention.packed import RowPlaces
from mobula.learner.policies.attention.row_packing import RowPacking
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import Policy, PolicyOutput, on_device
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families import family_of
from mobula.learner.policies.head import Distribution, ScoringHead, Steps


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
        with `learner.share_prompts`, if the family allows it, each prefix that rows share once.
        """
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
        sequence parallelism, of `own_targets`.
        """
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
