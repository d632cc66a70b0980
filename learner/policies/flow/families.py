"""Families of flow models, by the pipeline class that model_index.json of a diffusers checkpoint names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

INDEX = "model_index.json"
Conditions = Mapping[str, Tensor]  # forward() argument -> [N, ...]
Config = Mapping[str, Any]
TRANSFORMER = "transformer"  # the folder of the network that is trained, and its name in a pipeline


class FlowFamily(Protocol):
    """What differs between flow models."""

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        """forward() argument -> the encoded prompt, one row [1, ...] each; a long prompt is cut at `max_tokens`."""
        ...

    def latent_shape(self, model: Config, vae: Config, height: int, width: int) -> tuple[int, ...]:
        """Of the latents of one picture, given the configurations of transformer and VAE.

        Raises:
            ValueError: there are no pictures of this size.
        """
        ...

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        """[N, ...]: noise less picture, as the model predicts it for `latents` [N, ...]."""
        ...

    def decode(self, pipeline: Any, latents: Tensor) -> np.ndarray:
        """uint8 [N, H, W, 3]: the pictures of clean latents."""
        ...


@runtime_checkable
class PictureCodec(Protocol):
    """A family whose VAE turns pictures into latents: they can be taught, and chosen between."""

    def encode_pictures(self, pipeline: Any, pixels: np.ndarray) -> Tensor:
        """[N, ...]: clean latents of uint8 [N, H, W, 3]; `decode` gives the pictures again."""
        ...


class StableDiffusion3:
    """Stable Diffusion 3 and 3.5."""

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=[text],
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_tokens,
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def latent_shape(self, model: Config, vae: Config, height: int, width: int) -> tuple[int, ...]:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        multiple = factor * model["patch_size"]
        most = multiple * model["pos_embed_max_size"]
        if height % multiple or width % multiple or max(height, width) > most:
            raise ValueError(
                f"pictures of {height} x {width}: each side must be a multiple of {multiple} and at most {most}"
            )
        return (model["in_channels"], height // factor, width // factor)

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, return_dict=False, **conditions)[0]

    def encode_pictures(self, pipeline: Any, pixels: np.ndarray) -> Tensor:
        vae = pipeline.vae
        levels = torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).to(vae.dtype) / 127.5 - 1  # [N, 3, H, W]
        found = vae.encode(levels.to(vae.device))
        latents = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latents
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor

    def decode(self, pipeline: Any, latents: Tensor) -> np.ndarray:
        vae = pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        pixels = vae.decode(scaled, return_dict=False)[0].float()  # [N, 3, H, W] in -1 .. 1
        levels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        return levels.permute(0, 2, 3, 1).cpu().numpy()


FAMILIES: dict[str, FlowFamily] = {"StableDiffusion3Pipeline": StableDiffusion3()}


def flow_family_at(folder: Path) -> FlowFamily:
    """The family of the diffusers checkpoint in `folder`.

    Raises:
        ValueError: it is no such checkpoint, or of a family that is not supported.
    """
    try:
        name = json.loads((folder / INDEX).read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"policy.model={folder} is no diffusers checkpoint ({INDEX} cannot be used: {error}): name a folder that "
            "a pipeline was saved to"
        ) from error
    if name not in FAMILIES:
        raise ValueError(
            f"policy.model={folder} is a {name}, which is not supported: choose a checkpoint of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]
