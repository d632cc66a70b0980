"""Sana: prompts encoded by a Gemma, and a VAE that makes an image 32 times smaller."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from mobula.learner.policies.flow.families.base import (
    Conditions,
    Config,
    FlowFamily,
    ImageSize,
    config_of,
    fit,
    scaled_images,
    scaled_latents,
)

MASK = "encoder_attention_mask"


class Sana(FlowFamily):
    """Prompts are encoded as they are, without the pipeline's instruction to embellish them."""

    is_exact = False
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, mask, _, _ = pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=max_tokens, complex_human_instruction=None
        )
        return {"encoder_hidden_states": embeds, MASK: mask.to(embeds.dtype)}

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        factor = 2 ** (len(vae["encoder_block_out_channels"]) - 1)
        fit(size, factor * model["patch_size"])
        return (model["in_channels"], size.height // factor, size.width // factor)

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        output = model(
            hidden_states=latents,
            timestep=timesteps * config_of(model)["timestep_scale"],
            return_dict=False,
            **conditions,
        )[0]
        return output[:, : latents.shape[1]]  # a model that predicts its variance has as many channels more

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        return scaled_latents(vae, pixels)

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        return scaled_images(vae, latents)
