"""FlowFamily: how a family of flow models encodes prompts, denoises and decodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mobula.learner.policies.sde import guided

Conditions = Mapping[str, Tensor]  # forward() argument -> [N, ...]
Config = Mapping[str, Any]
Shape = tuple[int, ...]
MIN_ROWS = {"cpu": 16, "cuda": 4}  # of a forward pass; fewer have other kernels, and a row would depend on their number
IMAGES = "condition_latents"  # name of the encoded condition images among the inputs of a prompt, [N, images, ...]

TEXT_WIDTHS = (
    "crossattn_proj_in_channels", "joint_attention_dim", "cap_feat_dim", "caption_channels", "text_dim",
    "text_embed_dim",
)  # fmt: skip
POOLED = "pooled_projection_dim"
"""Keys of a transformer's configuration: sizes of a token of the encoded text (the first: of a projected one), and of
its pooled encoding."""

ATTENTION_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True)
class ImageSize:
    """Size of a denoised image, or of a video of several frames."""

    height: int
    width: int
    num_frames: int = 1


@dataclass(frozen=True)
class Schedule:
    """Noise levels of the S denoising steps, the model's times there, and the standard deviation of the first noise."""

    sigmas: Tensor  # float32 [S + 1], falling, within 0 .. 1
    timesteps: Tensor  # float32 [S]
    initial_std: float = 1.0


class FlowFamily(ABC):
    """A family of flow models of diffusers. Its latents are (1 - sigma) image + sigma noise."""

    lora_targets: tuple[str, ...] = ATTENTION_TARGETS  # linear layers that usually get adapters
    is_video = False  # whether the family denoises videos; other families take one frame
    encoder_parts: tuple[str, ...] = ()  # parts required to encode a prompt, besides tokenizers and text encoders
    num_images = range(1)  # condition images that a prompt may have
    starts_from_image = False  # whether denoising starts from the condition image with noise
    crops_images = False  # whether condition images are cut to the aspect ratio of the run; others are stretched
    is_exact = True  # whether a row is bit-identical for any number of rows in a forward pass; convolutions are not
    text_input = "encoder_hidden_states"  # forward() argument of the encoded text
    text_mask = ""  # name of its mask, if there is one
    has_clip_tokens = False  # whether the tokens of a CLIP are a part of the encoded text
    reads_shape = False  # whether encoding reads sizes from the pipeline's transformer
    placeholders: tuple[str, ...] = ()
    """Parts that the pipeline's constructor requires and that neither encoding nor denoising uses."""

    @abstractmethod
    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        """forward() argument -> the encoded prompt, one row [1, ...] each; a long prompt is cut at `max_tokens`.

        Every prompt has the same shapes.
        """

    def encode_with(
        self, pipeline: Any, text: str, images: Sequence[Image.Image], max_tokens: int
    ) -> dict[str, Tensor]:
        """Like `encode`, of a prompt with condition images, for families whose text encoder reads them."""
        return self.encode(pipeline, text, max_tokens)

    def encode_conditions(self, pipeline: Any, vae: Any, images: np.ndarray, size: ImageSize) -> dict[str, Tensor]:
        """Input of `velocity` -> encoded condition images, one row [1, ...] each, of uint8 [n, H, W, 3]."""
        return {IMAGES: self.encode_images(vae, images).unsqueeze(0)}

    def encoded_shapes(self, model: Config, max_tokens: int, latents: Shape, num_images: int) -> dict[str, Shape]:
        """Input of `velocity` -> shape of one row of what `encode` and `encode_conditions` return."""
        is_projected = model.get("use_crossattn_projection", False)
        width = next(model[key] for key in TEXT_WIDTHS[not is_projected :] if model.get(key))
        masks = {self.text_mask: (max_tokens,)} if self.text_mask else {}
        pooled = {"pooled_projections": (model[POOLED],)} if POOLED in model else {}
        images = {IMAGES: (num_images, *latents)} if num_images else {}
        return {self.text_input: (max_tokens, width), **masks, **pooled, **images}

    def first_latents(self, noise: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns [N, ...]: the latents at the noise level `sigma` where denoising starts, of scaled noise [N, ...]."""
        return noise

    def num_cut(self, pipeline: Any, text: str, max_tokens: int) -> int:
        """Tokens at the end of a text that even the encoder with the longest limit leaves out."""
        return max(0, len(pipeline.tokenizer(text).input_ids) - max_tokens)

    @abstractmethod
    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        """Returns the shape of the latents of one image or video, from the configurations of transformer and VAE.
        Raises: ValueError: the family does not support this size."""

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        """Returns [N, ...]: noise minus image, predicted for `latents` [N, ...].

        Only models that take the guidance as an input (`embeds_guidance`) read `guidance`, and only those with
        condition images among their inputs read the images.
        """
        others = with_images(latents, conditions)[1]
        return model(hidden_states=latents, timestep=timesteps, return_dict=False, **others)[0]

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        """uint8 [N, F, H, W, 3]: the frames of clean latents; one of an image."""
        return levels(self.pixels(vae, latents))

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        """[N, 3, F, H, W] in -1 .. 1: the frames of clean latents. The VAE has one scale and shift."""
        return decoded(vae, latents)

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        """[N, ...]: clean latents of images, uint8 [N, H, W, 3]; `decode` gives the images again. Of a family of
        videos they are those of videos of one frame."""
        return encoded(vae, pixels)

    def schedule(self, scheduler: Any, num_steps: int, shape: tuple[int, ...]) -> Schedule:
        """Returns the schedule of a pipeline's scheduler, for latents of `shape`."""
        scheduler.set_timesteps(num_steps)
        return Schedule(scheduler.sigmas, scheduler.timesteps.float())

    def times(self, sigmas: Tensor) -> Tensor:
        """The model's times at any noise levels."""
        return 1000 * sigmas

    def embeds_guidance(self, model: Config) -> bool:
        """Whether the guidance is an input of the model. Then there is no pass with a negative prompt."""
        return False

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Returns float32: the guided velocity from the velocities of prompt and negative prompt."""
        return guided(conditional, unconditional, scale)


MMDIT_TARGETS = (*ATTENTION_TARGETS, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Linear layers of blocks that attend over text and image together."""


class PackedFamily(FlowFamily):
    """A family whose latents become tokens of 2 x 2, and whose noise levels depend on how many there are."""

    lora_targets: tuple[str, ...] = MMDIT_TARGETS

    def schedule(self, scheduler: Any, num_steps: int, shape: tuple[int, ...]) -> Schedule:
        return with_dynamic_shift(scheduler, num_steps, shape[-2] // 2 * (shape[-1] // 2))

    def embeds_guidance(self, model: Config) -> bool:
        return bool(model.get("guidance_embeds"))


class VideoVaeFamily(FlowFamily):
    """A family whose VAE takes videos, and has a mean and a deviation for each channel. Latents: [N, C, F, H, W]."""

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(
            prompt=[text],
            do_classifier_free_guidance=False,
            max_sequence_length=max_tokens,
            device=pipeline.text_encoder.device,
        )
        return {"encoder_hidden_states": embeds}

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        """Configurations limit the numbers of latents on each axis (`max_size`), or those of their patches."""
        factor, (_, *patch) = 2 ** len(vae["temperal_downsample"]), model["patch_size"]
        most = model.get("rope_max_seq_len")
        num_frames, *sides = model["max_size"] if most is None else (most, *(most * side for side in patch))
        fit(size, factor * max(patch), factor * min(sides))
        num_latents = fit_frames(size, 2 ** sum(vae["temperal_downsample"]), num_frames)
        return (vae["z_dim"], num_latents, size.height // factor, size.width // factor)

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = statistics(vae, latents.device)
        return vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        latents = vae.encode(of_levels(vae, pixels).unsqueeze(2)).latent_dist.mode()
        mean, std = statistics(vae, latents.device)
        return (latents - mean) / std


def with_images(latents: Tensor, conditions: Conditions) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the latents to denoise and those of each condition image, [N, ...] each, and the other conditions."""
    images, others = conditions.get(IMAGES), {name: value for name, value in conditions.items() if name != IMAGES}
    return [latents, *(() if images is None else images.unbind(1))], others


def filled(rows: Tensor) -> Tensor:
    """Returns rows [N, ...] and, below `MIN_ROWS`, copies of them."""
    least = MIN_ROWS.get(rows.device.type, 1)
    return rows if len(rows) >= least else rows[torch.arange(least, device=rows.device) % len(rows)]


def config_of(model: nn.Module) -> Config:
    """The configuration of a network of diffusers; nn.Module's types have parameters and submodules alone."""
    config = getattr(model, "config", None)
    if not isinstance(config, Mapping):
        raise TypeError(f"{type(model).__name__} is no network of diffusers: it has no configuration")
    return config


def fit(size: ImageSize, multiple: int, most: int | None = None) -> None:
    """Raises: ValueError: a side of the image is no multiple of `multiple` or exceeds `most`."""
    sides = (size.height, size.width)
    limit = "" if most is None else f" and at most {most}"
    if any(side % multiple for side in sides) or (most is not None and max(sides) > most):
        raise ValueError(
            f"images of {size.height} x {size.width}: each side must be a multiple of {multiple}{limit}: "
            "set sampler.flow.height and sampler.flow.width"
        )


def fit_frames(size: ImageSize, per_latent: int, most: int) -> int:
    """Returns the number of latent frames. Raises: ValueError: the number of frames is not supported."""
    if size.num_frames % per_latent != 1 % per_latent or size.num_frames > most * per_latent:
        raise ValueError(
            f"sampler.flow.num_frames={size.num_frames}: a video has a multiple of {per_latent} frames and one more, "
            f"at most {(most - 1) * per_latent + 1}"
        )
    return (size.num_frames - 1) // per_latent + 1


def with_dynamic_shift(scheduler: Any, num_steps: int, num_places: int) -> Schedule:
    """The schedule of a model whose noise levels depend on how many tokens an image has.

    Source: FluxPipeline of diffusers.
    """
    own = scheduler.config
    low, high = own.get("base_image_seq_len", 256), own.get("max_image_seq_len", 4096)
    slope = (own.get("max_shift", 1.15) - own.get("base_shift", 0.5)) / (high - low)
    shift = own.get("base_shift", 0.5) + slope * (num_places - low)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=shift)
    return Schedule(scheduler.sigmas, scheduler.timesteps.float())


def packed(latents: Tensor, side: int = 2) -> Tensor:
    """[N, C, H, W] as tokens [N, L, C * side * side], row by row: one for each `side` x `side`."""
    num, channels, height, width = latents.shape
    tiles = latents.reshape(num, channels, height // side, side, width // side, side).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(num, -1, channels * side * side)


def unpacked(tokens: Tensor, height: int, width: int, side: int = 2) -> Tensor:
    """Inverse of `packed`, [N, C, H, W]."""
    num, channels = len(tokens), tokens.shape[-1] // side**2
    tiles = tokens.reshape(num, height // side, width // side, channels, side, side).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(num, channels, height, width)


def decoded(vae: Any, latents: Tensor) -> Tensor:
    """[N, 3, 1, H, W] in -1 .. 1: the images of clean latents, by a VAE of one scale and shift."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
    return vae.decode(scaled, return_dict=False)[0].unsqueeze(2)


def encoded(vae: Any, pixels: np.ndarray, finish: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Inverse of `decoded`; `finish` changes the VAE's latents before they are scaled."""
    found = vae.encode(of_levels(vae, pixels), return_dict=False)[0]  # latents, or a distribution of them
    latents = found if isinstance(found, Tensor) else found.mode()
    latents = latents if finish is None else finish(latents)
    return (latents - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor


def levels(pixels: Tensor) -> np.ndarray:
    """uint8 [N, F, H, W, 3] of [N, 3, F, H, W] in -1 .. 1."""
    found = ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return found.permute(0, 2, 3, 4, 1).cpu().numpy()


def statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, [1, C, 1, 1, 1]."""
    mean, std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def of_levels(vae: Any, pixels: np.ndarray) -> Tensor:
    """[N, 3, H, W] in -1 .. 1 of uint8 [N, H, W, 3]."""
    return torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).to(vae.device, vae.dtype) / 127.5 - 1
