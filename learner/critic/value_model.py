"""ValueModel: a (vision-)language model that predicts the return of each state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.token import TokenModel


class ScalarHead(nn.Module):
    """The inner product of a state with a learned vector, in float32 and without a bias.

    It starts from N(0, 1 / (H + 1)^2), so that values are near 0 at first. Every rank draws the same numbers from
    `seed`, and the generators of the process stay as they are.

    Source: Learning to Summarize from Human Feedback, arXiv:2009.01325, appendix B.1.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        drawn = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(drawn / (hidden_size + 1))  # [1, H], the layout of a linear layer

    def forward(self, states: Tensor) -> Tensor:
        """states [..., H] of any float type -> float32 [...]."""
        return (states.float() * self.weight[0].float()).sum(dim=-1)


class ValueModel(TokenModel):
    """The backbone of a model with a scalar head in the place of its output layer."""

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, seed: int, sequence_ranks: SequenceRanks | None = None
    ) -> None:
        """Takes the output layer out of `model`, which no other part may use from here on."""
        super().__init__(model, config, sequence_ranks)
        model.set_output_embeddings(nn.Identity())
        self.head = ScalarHead(model.config.get_text_config().hidden_size, seed)

    def forward(self, batch: TokenBatch) -> Tensor:
        """float32 [B, T]: the value of the state before each target; 0 behind a row's last target."""
        values = self.head(self.states(batch))  # [N]
        return self.padded(batch, values)
