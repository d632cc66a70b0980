"""Cosmos Predict 2 (images) and 2.5 (videos), from a text.

Cosmos Predict 2 is written in the noise levels s of EDM; `learner.policies.sde` has the mapping. Its network is given
the mapped latents and predicts their velocity, so it is a flow model on the levels s / (1 + s).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mobula.learner.policies.flow.families.base import (
    Conditions,
    Config,
    FlowFamily,
    ImageSize,
    Schedule,
    fit,
    fit_frames,
    normalised_frames,
    normalised_latents,
)
from mobula.learner.policies.sde import flow_level, guided

SAFETY = "safety_checker"
MIN_SIGMA, MAX_SIGMA = 0.002, 80.0  # EDM levels of Cosmos2TextToImagePipeline


class CosmosPredict2(FlowFamily):
    """`guidance` is the pipeline's `guidance_scale`: c + g (c - u).

    The safety checker belongs to the pipeline that serves images, and does not run in training.
    """

    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    placeholders = (SAFETY,)

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(
            prompt=[text],
            do_classifier_free_guidance=False,
            max_sequence_length=max_tokens,
            device=pipeline.text_encoder.device,
        )
        return {"encoder_hidden_states": embeds}

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        factor = 2 ** len(vae["temperal_downsample"])
        patch, most = model["patch_size"], model["max_size"]
        fit(size, factor * max(patch[1:]), factor * min(most[1:]))
        num_frames = fit_frames(size, 2 ** sum(vae["temperal_downsample"]), most[0])
        return (vae["z_dim"], num_frames, size.height // factor, size.width // factor)

    def schedule(self, scheduler: Any, num_steps: int, shape: tuple[int, ...]) -> Schedule:
        """The levels of EDM by Karras et al., and 0 at the end, where the pipeline stays at the lowest."""
        scheduler.register_to_config(sigma_max=MAX_SIGMA, sigma_min=MIN_SIGMA)
        scheduler.set_timesteps(sigmas=np.linspace(0, 1, num_steps))
        sigmas = flow_level(scheduler.sigmas)
        return Schedule(sigmas, self.times(sigmas[:-1]), float(sigmas[0]))

    def times(self, sigmas: Tensor) -> Tensor:
        return sigmas

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return model(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype),
            padding_mask=latents.new_zeros(1, 1, *latents.shape[-2:]),
            return_dict=False,
            **conditions,
        )[0]

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        return guided(conditional, unconditional, 1 + scale)

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        return normalised_latents(vae, pixels)

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        return normalised_frames(vae, latents)


class CosmosPredict25(CosmosPredict2):
    """Prompts are encoded by all layers of a Qwen2.5-VL; each latent frame has a time of its own."""

    is_video = True
    encoder_parts = ("vae",)

    def schedule(self, scheduler: Any, num_steps: int, shape: tuple[int, ...]) -> Schedule:
        scheduler.set_timesteps(num_steps)
        return Schedule(scheduler.sigmas, self.times(scheduler.sigmas[:-1]))

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        num, _, num_frames, *sides = latents.shape
        return model(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype).view(num, 1, 1, 1, 1).expand(num, 1, num_frames, 1, 1),
            condition_mask=torch.zeros_like(latents[:, :1]),
            padding_mask=latents.new_zeros(1, 1, *sides),
            return_dict=False,
            **conditions,
        )[0]
