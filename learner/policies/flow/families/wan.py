"""Wan 2.1, text to video."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from mobula.learner.policies.flow.families.base import (
    Conditions,
    Config,
    FlowFamily,
    ImageSize,
    fit,
    fit_frames,
    normalised_frames,
    normalised_latents,
)


class Wan(FlowFamily):
    """A UMT5 and a causal video VAE: one latent frame for the first frame, one for each four after it."""

    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    is_video = True

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(
            prompt=[text], do_classifier_free_guidance=False, max_sequence_length=max_tokens
        )
        return {"encoder_hidden_states": embeds}

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        factor = 2 ** len(vae["temperal_downsample"])
        patch, most = model["patch_size"], model["rope_max_seq_len"]
        fit(size, factor * max(patch[1:]), factor * min(patch[1:]) * most)
        num_frames = fit_frames(size, 2 ** sum(vae["temperal_downsample"]), most)
        return (model["in_channels"], num_frames, size.height // factor, size.width // factor)

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, return_dict=False, **conditions)[0]

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        return normalised_latents(vae, pixels)

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        return normalised_frames(vae, latents)
