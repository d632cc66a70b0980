"""Qwen-Image: prompts encoded by a Qwen2.5-VL, latents in tokens of 2 x 2, guidance that keeps the length of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import pad

from mobula.learner.policies.flow.families.base import (
    Conditions,
    Config,
    ImageSize,
    PackedFamily,
    config_of,
    fit,
    normalised_frames,
    normalised_latents,
    packed,
    unpacked,
)
from mobula.learner.policies.sde import guided

MASK = "encoder_hidden_states_mask"


class QwenImage(PackedFamily):
    """One text encoder, whose rows are filled up to the longest prompt."""

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(prompt=[text], max_sequence_length=max_tokens)
        missing = max_tokens - embeds.shape[1]
        mask = pad(embeds.new_ones(embeds.shape[:2]), (0, missing))
        return {"encoder_hidden_states": pad(embeds, (0, 0, 0, missing)), MASK: mask}

    def num_cut(self, pipeline: Any, text: str, max_tokens: int) -> int:
        """Number of template tokens around the text that the pipeline counts, without those at the beginning, which it
        cuts."""
        whole = pipeline.prompt_template_encode.format(text)
        return super().num_cut(pipeline, whole, max_tokens + pipeline.prompt_template_encode_start_idx)

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        factor = 2 ** len(vae["temperal_downsample"])
        fit(size, 2 * factor)
        return (model["in_channels"] // 4, size.height // factor, size.width // factor)

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        height, width = latents.shape[-2:]
        tokens = model(
            hidden_states=packed(latents),
            timestep=timesteps / 1000,
            guidance=timesteps.new_full((len(latents),), guidance) if self.embeds_guidance(config_of(model)) else None,
            img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
            return_dict=False,
            **{**conditions, MASK: conditions[MASK].bool()},
        )[0]
        return unpacked(tokens, height, width)

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """u + g (c - u), each token as long as that of the prompt alone. Source: QwenImagePipeline of diffusers."""
        own, both = packed(conditional.float()), packed(guided(conditional, unconditional, scale))
        rescaled = both * (own.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
        return unpacked(rescaled, *conditional.shape[-2:])

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        return normalised_latents(vae, pixels).squeeze(2)

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        return normalised_frames(vae, latents.unsqueeze(2))
