"""Families of flow models, by the pipeline class that model_index.json of a diffusers checkpoint names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mobula.learner.policies.flow.families.base import (
    MMDIT_TARGETS,
    Conditions,
    Config,
    FlowFamily,
    ImageSize,
    PackedFamily,
    Schedule,
    VideoVaeFamily,
    config_of,
    fit,
    fit_frames,
    packed,
    unpacked,
)
from mobula.learner.policies.sde import flow_level, guided


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
        num, _, num_frames, *sides = latents.shape
        return model(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype).view(num, 1, 1, 1, 1).expand(num, 1, num_frames, 1, 1),
            condition_mask=torch.zeros_like(latents[:, :1]),
            padding_mask=latents.new_zeros(1, 1, *sides),
            return_dict=False,
            **conditions,
        )[0]


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
    "NextStepPipeline": "NextStep-1 is neither in diffusers nor in transformers, and remote code is not run",
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
