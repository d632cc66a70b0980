"""Families of flow models, by the pipeline class that model_index.json of a diffusers checkpoint names."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mobula.learner.policies.sde import flow_level, guided

Conditions = Mapping[str, Tensor]  # forward() argument -> [N, ...]
Config = Mapping[str, Any]


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

    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")  # linear layers that usually get adapters
    is_video = False  # whether the family denoises videos; other families take one frame
    encoder_parts: tuple[str, ...] = ()  # parts required to encode a prompt, besides tokenizers and text encoders
    is_exact = True  # whether a row is bit-identical for any number of rows in a forward pass; convolutions are not
    reads_shape = False  # whether encoding reads sizes from the pipeline's transformer
    placeholders: tuple[str, ...] = ()
    """Parts that the pipeline's constructor requires and that neither encoding nor denoising uses."""

    @abstractmethod
    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        """forward() argument -> the encoded prompt, one row [1, ...] each; a long prompt is cut at `max_tokens`.

        Every prompt has the same shapes.
        """

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

        Only models that take the guidance as an input (`embeds_guidance`) read `guidance`.
        """
        return model(hidden_states=latents, timestep=timesteps, return_dict=False, **conditions)[0]

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        """uint8 [N, F, H, W, 3]: the frames of clean latents; one of an image. The VAE has one scale and shift."""
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


MMDIT_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Linear layers of blocks that attend over text and image together."""


class PackedFamily(FlowFamily):
    """A family whose latents become tokens of 2 x 2, and whose noise levels depend on how many there are."""

    lora_targets = MMDIT_TARGETS

    def schedule(self, scheduler: Any, num_steps: int, shape: tuple[int, ...]) -> Schedule:
        return with_dynamic_shift(scheduler, num_steps, shape[-2] // 2 * (shape[-1] // 2))

    def embeds_guidance(self, model: Config) -> bool:
        return bool(model.get("guidance_embeds"))


class VideoVaeFamily(FlowFamily):
    """A family whose VAE takes videos, and has a mean and a deviation for each channel. Latents: [N, C, F, H, W]."""

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        mean, std = _statistics(vae, latents.device)
        return levels(vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0])

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        latents = vae.encode(_of_levels(vae, pixels).unsqueeze(2)).latent_dist.mode()
        mean, std = _statistics(vae, latents.device)
        return (latents - mean) / std


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


def packed(latents: Tensor) -> Tensor:
    """[N, C, H, W] as tokens [N, H/2 * W/2, 4 C]: one for each 2 x 2."""
    num, channels, height, width = latents.shape
    tiles = latents.reshape(num, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(num, height // 2 * (width // 2), 4 * channels)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """Inverse of `packed`, [N, C, H, W]."""
    num, channels = len(tokens), tokens.shape[-1] // 4
    tiles = tokens.reshape(num, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(num, channels, height, width)


def decoded(vae: Any, latents: Tensor) -> np.ndarray:
    """uint8 [N, F, H, W, 3]: the images of clean latents, by a VAE of one scale and shift."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
    return levels(vae.decode(scaled, return_dict=False)[0].unsqueeze(2))


def encoded(vae: Any, pixels: np.ndarray, finish: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Inverse of `decoded`; `finish` changes the VAE's latents before they are scaled."""
    found = vae.encode(_of_levels(vae, pixels), return_dict=False)[0]  # latents, or a distribution of them
    latents = found if isinstance(found, Tensor) else found.mode()
    latents = latents if finish is None else finish(latents)
    return (latents - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor


def levels(pixels: Tensor) -> np.ndarray:
    """uint8 [N, F, H, W, 3] of [N, 3, F, H, W] in -1 .. 1."""
    found = ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return found.permute(0, 2, 3, 4, 1).cpu().numpy()


def _statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, [1, C, 1, 1, 1]."""
    mean, std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def _of_levels(vae: Any, pixels: np.ndarray) -> Tensor:
    """[N, 3, H, W] in -1 .. 1 of uint8 [N, H, W, 3]."""
    return torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).to(vae.device, vae.dtype) / 127.5 - 1


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


QWEN_IMAGE_MASK = "encoder_hidden_states_mask"


class QwenImage(PackedFamily, VideoVaeFamily):
    """One text encoder, whose rows are filled up to the longest prompt."""

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(prompt=[text], max_sequence_length=max_tokens)
        missing = max_tokens - embeds.shape[1]
        mask = pad(embeds.new_ones(embeds.shape[:2]), (0, missing))
        return {"encoder_hidden_states": pad(embeds, (0, 0, 0, missing)), QWEN_IMAGE_MASK: mask}

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
            **{**conditions, QWEN_IMAGE_MASK: conditions[QWEN_IMAGE_MASK].bool()},
        )[0]
        return unpacked(tokens, height, width)

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """u + g (c - u), each token as long as that of the prompt alone. Source: QwenImagePipeline of diffusers."""
        own, both = packed(conditional.float()), packed(guided(conditional, unconditional, scale))
        rescaled = both * (own.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
        return unpacked(rescaled, *conditional.shape[-2:])

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        return super().encode_images(vae, pixels).squeeze(2)

    def decode(self, vae: Any, latents: Tensor) -> np.ndarray:
        return super().decode(vae, latents.unsqueeze(2))


SANA_MASK = "encoder_attention_mask"


class Sana(FlowFamily):
    """Prompts are encoded as they are, without the pipeline's instruction to embellish them."""

    is_exact = False

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, mask, _, _ = pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=max_tokens, complex_human_instruction=None
        )
        return {"encoder_hidden_states": embeds, SANA_MASK: mask.to(embeds.dtype)}

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


class Wan(VideoVaeFamily):
    """A UMT5 and a causal video VAE: one latent frame for the first frame, one for each four after it."""

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


# Cosmos Predict 2 (images) and 2.5 (videos), from a text.
#
# Cosmos Predict 2 is written in the noise levels s of EDM; `learner.policies.sde` has the mapping. Its network is given
# the mapped latents and predicts their velocity, so it is a flow model on the levels s / (1 + s).

SAFETY = "safety_checker"
MIN_SIGMA, MAX_SIGMA = 0.002, 80.0  # EDM levels of Cosmos2TextToImagePipeline


class CosmosPredict2(VideoVaeFamily):
    """`guidance` is the pipeline's `guidance_scale`: c + g (c - u).

    The safety checker belongs to the pipeline that serves images, and does not run in training.
    """

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
        num, _, num_frames = latents.shape[:3]
        times = timesteps.view(num, 1, 1, 1, 1).expand(num, 1, num_frames, 1, 1)
        given = {**conditions, "condition_mask": torch.zeros_like(latents[:, :1])}
        return super().velocity(model, latents, times, given, guidance)


INDEX = "model_index.json"
TRANSFORMER = "transformer"  # the folder of the network that is trained, and its name in a pipeline

FAMILIES: dict[str, FlowFamily] = {
    "StableDiffusion3Pipeline": StableDiffusion3(),
    "FluxPipeline": Flux(),
    "QwenImagePipeline": QwenImage(),
    "SanaPipeline": Sana(),
    "WanPipeline": Wan(),
    "Cosmos2TextToImagePipeline": CosmosPredict2(),
    "Cosmos2_5_PredictBasePipeline": CosmosPredict25(),
}

_TAKES_IMAGES = "it is conditioned on an image or video as well, and a row of a flow model has a text alone"
REFUSED: dict[str, str] = {
    "WanImageToVideoPipeline": _TAKES_IMAGES,
    "WanVideoToVideoPipeline": _TAKES_IMAGES,
    "WanVACEPipeline": _TAKES_IMAGES,
    "FluxKontextPipeline": _TAKES_IMAGES,
    "QwenImageEditPipeline": _TAKES_IMAGES,
    "Cosmos2VideoToWorldPipeline": _TAKES_IMAGES,
    "CosmosTextToWorldPipeline": "Cosmos Predict 1 predicts noise on EDM levels; use Cosmos Predict 2 or 2.5",
    "SanaSprintPipeline": "a model of one or two distilled steps has no schedule of stochastic steps",
    "StableDiffusionPipeline": "it predicts noise and is no flow model",
    "StableDiffusionXLPipeline": "it predicts noise and is no flow model",
    "NextStepPipeline": "it denoises tokens of images: set sampler=image_patches, and name its released checkpoint",
}
"""Pipeline class -> why there is no family of it."""


def flow_family_at(folder: Path) -> FlowFamily:
    """The family of the diffusers checkpoint in `folder`."""
    index = pipeline_index(folder)
    name = index["_class_name"]
    if name not in FAMILIES:
        reason = f" ({REFUSED[name]})" if name in REFUSED else ""
        raise ValueError(
            f"policy.model={folder} is a {name}, which is not supported{reason}: choose a checkpoint of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    if any(index.get("transformer_2", ())):
        raise ValueError(
            f"policy.model={folder} has two transformers, one for each half of the noise levels (Wan 2.2), of which a "
            "policy can train one: choose a checkpoint of Wan 2.1"
        )
    return FAMILIES[name]


def pipeline_index(folder: Path) -> dict[str, Any]:
    """The content of model_index.json: the pipeline's class, and [library, class] of each part."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"policy.model={folder} is no diffusers checkpoint ({INDEX} cannot be used: {error}): name a folder that "
            "a pipeline was saved to"
        ) from error
    return index
