"""TokenPolicy: a (vision-)language model as a policy over tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.policies.batch import TokenBatch
from learner.policies.families import family_of
from learner.policies.logprobs import Distribution, token_logprobs


class PolicyOutput(NamedTuple):
    """What the policy says about each target of a batch; 0 and False behind a row's end."""

    logprobs: Tensor  # float32 [B, T]
    entropy: Tensor  # float32 [B, T], detached unless a gradient was asked for
    is_argmax: Tensor  # bool [B, T]


class TokenModel(nn.Module):
    """A model that is read at the states before a batch's targets.

    A subclass has the `forward`, which is the only way in. It reads `states` once, and that enters the vision tower
    exactly once, so that sharded parameters are gathered equally often on every rank: a batch without pictures shows
    the tower a blank one and adds it with weight 0. What enters the decoder is the model family's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.family = family_of(model.config, model.config.name_or_path)

    def states(self, batch: TokenBatch) -> Tensor:
        """[N, H]: the decoder's last state before each of the N targets, in the order of `batch.target_mask`."""
        hidden = self.family.hidden_states(self.model, batch)  # [B, S, H]
        return hidden[batch.hidden_rows, batch.hidden_columns]


class TokenPolicy(TokenModel):
    """Scores targets given everything before them."""

    def forward(
        self, batch: TokenBatch, distribution: Distribution, *, entropy_has_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probs of the batch's targets under `distribution`; logits exist for those positions only."""
        logits = self.model.get_output_embeddings()(self.states(batch))  # [N, V]
        targets = batch.targets[batch.target_mask]
        flat = token_logprobs(logits, targets, distribution, entropy_has_gradient=entropy_has_gradient)
        mask = batch.target_mask
        return PolicyOutput(*(part.new_zeros(mask.shape).masked_scatter(mask, part) for part in flat))
