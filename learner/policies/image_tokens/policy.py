"""ImageTokenPolicy: a model that draws an image token by token, as a policy over these tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.base import Policy, PolicyOutput
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.image_tokens.guidance import TRAINED, embedded, head_states, image_logits, without_text
from mobula.learner.policies.logprobs import Distribution, TokenLogprobs, token_logprobs


class ImageTokenPolicy(Policy):
    """Scores the image tokens behind a prompt, with the guidance that they were sampled with."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, guidance: float) -> None:
        super().__init__()
        self.model = model
        self._guidance = guidance
        self._chunk_tokens = config.logprob_chunk_tokens

    def blocks(self) -> Iterator[nn.Module]:
        return (module for module in self.modules() if isinstance(module, GradientCheckpointingLayer))

    def forward(
        self, batch: TokenBatch, distribution: Distribution, *, entropy_has_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probs of the batch's targets; logits are kept for no chunk of them, but computed again."""
        states, targets = self._states(batch), batch.targets[batch.hidden_rows, batch.target_columns]

        def scored(states: Tensor, targets: Tensor) -> TokenLogprobs:
            logits = image_logits(self.model, states)
            return token_logprobs(logits, targets, distribution, entropy_has_gradient=entropy_has_gradient)

        parts = zip(states.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True)
        found = [checkpoint(scored, *part, use_reentrant=False) for part in parts]
        logprobs, entropy, is_argmax = (batch.padded(torch.cat(column)) for column in zip(*found, strict=True))
        return PolicyOutput(logprobs, entropy, is_argmax)

    def _states(self, batch: TokenBatch) -> Tensor:
        """float32 [N, P]: before each of the N targets."""
        ids, rows, columns = batch.input_ids, batch.hidden_rows, batch.hidden_columns
        last = torch.full_like(ids[:, 0], ids.shape[1]).scatter_reduce(0, rows, columns, "amin")  # of each prompt
        is_text = torch.arange(ids.shape[1], device=ids.device) <= last[:, None]
        if self._guidance != 1:
            ids = torch.cat([ids, torch.where(is_text, without_text(self.model, ids), ids)])
            rows, columns = torch.cat([rows, rows + len(is_text)]), columns.repeat(2)
            is_text = is_text.repeat(2, 1)
        embeds = embedded(self.model, ids, is_text)
        decoder = self.model.get_submodule("model.language_model")
        hidden = decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return head_states(self.model, hidden[rows, columns], self._guidance)


def freeze_the_rest(model: PreTrainedModel) -> PreTrainedModel:
    """Take out of training what image tokens are not predicted by."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED))
    return model
