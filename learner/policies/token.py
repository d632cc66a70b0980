"""TokenPolicy: a (vision-)language model as a policy over tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.policies.batch import MediaBatch, PositionLayout, TokenBatch
from learner.policies.families import VISION_FAMILIES
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
    the tower a blank one and adds it with weight 0.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.has_vision = model.config.model_type in VISION_FAMILIES

    def states(self, batch: TokenBatch) -> Tensor:
        """[N, H]: the decoder's last state before each of the N targets, in the order of `batch.target_mask`."""
        hidden = self.model.get_decoder()(
            inputs_embeds=self._embed(batch), position_ids=self._positions(batch.layout), use_cache=False
        ).last_hidden_state  # [B, S, H]
        return hidden[batch.hidden_rows, batch.hidden_columns]

    def _embed(self, batch: TokenBatch) -> Tensor:
        """Token embeddings with pictures in their places, [B, S, H]; a picture is encoded once, however often used."""
        embeds = self.model.get_input_embeddings()(batch.input_ids)
        if not self.has_vision:
            if batch.media.inputs:
                raise ValueError(
                    f"policy.model is of type {self.model.config.model_type}, which takes no pictures here, "
                    f"but a prompt has some: use a model of type {' or '.join(VISION_FAMILIES)}"
                )
            return embeds
        if not batch.media.inputs:
            return embeds + 0.0 * self._encode(self._blank_picture(embeds.device)).sum()
        pictures = self._encode(batch.media.inputs).to(embeds.dtype)  # [num_embeddings, H]
        self._check_count(pictures, batch.media)
        return embeds.index_put((batch.media.rows, batch.media.columns), pictures[batch.media.sources])

    def _encode(self, inputs: dict[str, Tensor]) -> Tensor:
        return torch.cat(tuple(self.model.model.get_image_features(**inputs, return_dict=True).pooler_output))

    def _check_count(self, pictures: Tensor, media: MediaBatch) -> None:
        if pictures.shape[0] != media.num_embeddings:
            raise ValueError(
                f"the recorded media spans hold {media.num_embeddings} placeholders but the vision tower made "
                f"{pictures.shape[0]} embeddings: prompts were processed with another model's processor"
            )

    def _blank_picture(self, device: torch.device) -> dict[str, Tensor]:
        """The smallest picture that the tower takes."""
        vision = self.model.config.vision_config
        side = vision.spatial_merge_size
        channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(side * side, channels, device=device),
            "image_grid_thw": torch.tensor([[1, side, side]], device=device),
        }

    def _positions(self, layout: PositionLayout) -> Tensor | None:
        """M-RoPE positions [3, B, S] by the model's own rule; None lets a text model count for itself.

        Positions depend on where pictures stand and how large they are, not on the tokens: one row a layout is enough.
        Without an attention mask the rule counts on through the padding, which nothing looks at.
        """
        if not self.has_vision:
            return None
        grids = layout.image_grid_thw
        positions, _ = self.model.model.get_rope_index(
            layout.token_types,
            mm_token_type_ids=layout.token_types,
            image_grid_thw=grids if grids.shape[0] else None,
        )
        return positions[:, layout.row_layouts]


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
