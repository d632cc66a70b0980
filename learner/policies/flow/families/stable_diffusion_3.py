"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from mobula.learner.policies.flow.families.base import (
    MMDIT_TARGETS,
    Conditions,
    Config,
    FlowFamily,
    ImageSize,
    fit,
    scaled_images,
    scaled_latents,
)


class StableDiffusion3(FlowFamily):
    """Two CLIPs and a T5, latents of 16 channels, an MMDiT."""

    lora_targets = MMDIT_TARGETS
    reads_shape = True  # for the zeros in the place of a T5 that is left out

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=[text],
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_tokens,
            device=pipeline.text_encoder.device,
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def num_cut(self, pipeline: Any, text: str, max_tokens: int) -> int:
        """By T5 or CLIP, whichever reads more of the text; the limit of a CLIP is its own, and a T5 may be left out."""
        by_clip = super().num_cut(pipeline, text, pipeline.tokenizer.model_max_length)
        if by_clip == 0 or pipeline.tokenizer_3 is None:
            return by_clip
        return min(by_clip, max(0, len(pipeline.tokenizer_3(text).input_ids) - max_tokens))

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        multiple = factor * model["patch_size"]
        fit(size, multiple, multiple * model["pos_embed_max_size"])
        return (model["in_channels"], size.height // factor, size.width // factor)

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, return_dict=False, **conditions)[0]

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        return scaled_latents(vae, pixels)

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        return scaled_images(vae, latents)
