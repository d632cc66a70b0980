"""ImageCodec: the VAE between images and continuous tokens, as released or in the layout of diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from torch import Tensor
from torch.nn.functional import layer_norm

from mobula.learner.policies.flow.family import decoded, encoded, levels, packed, unpacked

RELEASED = "checkpoint.pt"
EPSILON = 1e-6  # of layer norms


def normalised(tokens: Tensor) -> Tensor:
    """Layer norm without parameters over the numbers of each token [..., D]."""
    return layer_norm(tokens, tokens.shape[-1:], eps=EPSILON)


class ImageCodec:
    """A VAE whose latents are cut into tokens of `side` x `side`."""

    def __init__(self, folder: Path, side: int, dtype: torch.dtype) -> None:
        """`folder` is the VAE's."""
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.vae: Any = released_vae(folder, settings) if (folder / RELEASED).is_file() else _of_diffusers(folder)
        self.vae.to(dtype).eval().requires_grad_(False)
        self._side = side
        self._normalised_side = (settings.get("psz") or 1) if settings.get("encoder_norm") else 0

    @torch.no_grad()
    def decode(self, tokens: Tensor, rows: int) -> np.ndarray:
        """uint8 [N, H, W, 3]: of tokens [N, L, D] in `rows` rows."""
        height, width = rows * self._side, tokens.shape[1] // rows * self._side
        return levels(decoded(self.vae, unpacked(tokens, height, width, self._side)))[:, 0]

    @torch.no_grad()
    def encode(self, pixels: np.ndarray) -> Tensor:
        """float32 [N, L, D]: of images, uint8 [N, H, W, 3]."""
        latents = encoded(self.vae, pixels, self._normalised if self._normalised_side else None)
        return packed(latents.float(), self._side)

    def _normalised(self, latents: Tensor) -> Tensor:
        """Layer norm over the numbers of each patch, as the released encoder does with `encoder_norm`."""
        side = self._normalised_side
        return unpacked(normalised(packed(latents, side)), latents.shape[-2], latents.shape[-1], side)


def vae_of(settings: dict[str, Any]) -> Any:
    """A VAE of random weights with these settings, which are those of a released one or of diffusers."""
    if "_class_name" in settings:
        return getattr(diffusers, settings["_class_name"]).from_config(settings)
    widths = [settings.get("ch", 128) * multiple for multiple in settings.get("ch_mult", [1, 2, 4, 4])]
    num = len(widths)
    return diffusers.AutoencoderKL(
        in_channels=settings.get("in_channels", 3),
        out_channels=settings.get("out_ch", 3),
        down_block_types=("DownEncoderBlock2D",) * num,
        up_block_types=("UpDecoderBlock2D",) * num,
        block_out_channels=tuple(widths),
        layers_per_block=settings.get("num_res_blocks", 2),
        latent_channels=settings.get("z_channels", 16),
        scaling_factor=settings.get("scaling_factor", 0.3611),
        shift_factor=settings.get("shift_factor", 0.1159),
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def released_vae(folder: Path, settings: dict[str, Any]) -> diffusers.AutoencoderKL:
    """Reads config.json and checkpoint.pt of a released VAE, whose modules have the names of the original FLUX."""
    vae = vae_of(settings)
    stored = torch.load(folder / RELEASED, map_location="cpu", weights_only=True)
    state = convert_ldm_vae_checkpoint(stored, vae.config)
    missing, unexpected = vae.load_state_dict(state, strict=False)
    if missing or unexpected or len(state) != len(stored):
        raise ValueError(
            f"{folder / RELEASED} does not fit its config.json: {len(missing)} tensors are missing "
            f"{missing[:2]}, and {len(stored) - len(state) + len(unexpected)} are left over: download both again"
        )
    return vae


def _of_diffusers(folder: Path) -> Any:
    return diffusers.AutoModel.from_pretrained(str(folder), trust_remote_code=False)
