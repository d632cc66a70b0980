"""ValueModel: a (vision-)language model that predicts the return of each state."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.learner.critic.head import ScalarHead
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.token import TokenModel


class ValueModel(TokenModel):
    """The backbone of a model with a scalar head in the place of its output layer."""

    def __init__(
        self, model: PreTrainedModel, seed: int, *, packs: bool, sequence_ranks: SequenceRanks | None = None
    ) -> None:
        """Takes the output layer out of `model`, which no other part may use from here on."""
        super().__init__(model, packs=packs, sequence_ranks=sequence_ranks)
        model.set_output_embeddings(nn.Identity())
        self.head = ScalarHead(model.config.get_text_config().hidden_size, seed)

    def forward(self, batch: TokenBatch) -> Tensor:
        """float32 [B, T]: the value of the state before each target; 0 behind a row's last target."""
        values = self.head(self.states(batch))  # [N]
        return self.padded(batch, values)
