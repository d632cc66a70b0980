"""Flux.1: latents in tokens of 2 x 2, and, where it is distilled, the guidance as an input of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mobula.learner.policies.flow.families.base import (
    Conditions,
    Config,
    ImageSize,
    PackedFamily,
    config_of,
    fit,
    packed,
    scaled_images,
    scaled_latents,
    unpacked,
)


class Flux(PackedFamily):
    """A CLIP and a T5; Flux.1 dev takes its guidance as an input, schnell takes a negative prompt or none."""

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, pooled, _ = pipeline.encode_prompt(prompt=[text], prompt_2=None, max_sequence_length=max_tokens)
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def num_cut(self, pipeline: Any, text: str, max_tokens: int) -> int:
        """By the T5."""
        return max(0, len(pipeline.tokenizer_2(text).input_ids) - max_tokens)

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        fit(size, 2 * factor)
        return (model["in_channels"] // 4, size.height // factor, size.width // factor)

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        height, width = latents.shape[-2:]
        image_ids = torch.zeros(height // 2, width // 2, 3, device=latents.device, dtype=latents.dtype)
        image_ids[..., 1] += torch.arange(height // 2, device=latents.device)[:, None]
        image_ids[..., 2] += torch.arange(width // 2, device=latents.device)
        tokens = model(
            hidden_states=packed(latents),
            timestep=(timesteps / 1000).to(latents.dtype),
            guidance=timesteps.new_full((len(latents),), guidance) if self.embeds_guidance(config_of(model)) else None,
            txt_ids=latents.new_zeros(conditions["encoder_hidden_states"].shape[1], 3),
            img_ids=image_ids.reshape(-1, 3),
            return_dict=False,
            **conditions,
        )[0]
        return unpacked(tokens, height, width)

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        return scaled_latents(vae, pixels)

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        return scaled_images(vae, latents)
