"""Families of flow models, by the pipeline class that model_index.json of a diffusers checkpoint names."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from mobula.cluster.weight_sync.manifest import NETWORKS
from mobula.learner.policies.flow.family import (
    ATTENTION_TARGETS,
    IMAGES,
    MMDIT_TARGETS,
    Conditions,
    Config,
    FlowFamily,
    ImageSize,
    PackedFamily,
    Schedule,
    Shape,
    VideoVaeFamily,
    config_of,
    fit,
    of_levels,
    packed,
    statistics,
    unpacked,
    with_images,
)
from mobula.learner.policies.sde import flow_level, guided

CAPTION, CAPTION_MASK = "cap_feats", "cap_mask"


class StableDiffusion3(FlowFamily):
    """Two CLIPs and a T5, latents of 16 channels, an MMDiT."""

    lora_targets = MMDIT_TARGETS
    has_clip_tokens = True
    reads_shape = True  # for the zeros in the place of a T5 that is left out
    num_images = range(2)
    starts_from_image = True

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

    def first_latents(self, noise: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Source: StableDiffusion3Img2ImgPipeline of diffusers, with the mode of the encoded image."""
        image = conditions.get(IMAGES)
        return noise if image is None else sigma * noise + (1 - sigma) * image[:, 0]


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
        parts, others = with_images(latents, conditions)
        tokens = torch.cat([packed(part) for part in parts], 1)
        sides = (range(len(parts)), range(height // 2), range(width // 2))
        image_ids = torch.cartesian_prod(*(torch.tensor(side, device=latents.device) for side in sides))
        output = model(
            hidden_states=tokens,
            timestep=(timesteps / 1000).to(latents.dtype),
            guidance=timesteps.new_full((len(latents),), guidance) if self.embeds_guidance(config_of(model)) else None,
            txt_ids=latents.new_zeros(others["encoder_hidden_states"].shape[1], 3),
            img_ids=image_ids.to(latents.dtype),
            return_dict=False,
            **others,
        )[0]
        return unpacked(output[:, : height // 2 * (width // 2)], height, width)


class FluxKontext(Flux):
    """Flux with a condition image as further tokens; without one it is Flux."""

    num_images = range(2)


QWEN_IMAGE_MASK = "encoder_hidden_states_mask"


class QwenImage(PackedFamily, VideoVaeFamily):
    """One text encoder, whose rows are filled up to the longest prompt."""

    text_mask = QWEN_IMAGE_MASK

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
        parts, others = with_images(latents, conditions)
        tokens = model(
            hidden_states=torch.cat([packed(part) for part in parts], 1),
            timestep=timesteps / 1000,
            guidance=timesteps.new_full((len(latents),), guidance) if self.embeds_guidance(config_of(model)) else None,
            img_shapes=[[(1, height // 2, width // 2)] * len(parts)] * len(latents),
            return_dict=False,
            **{**others, QWEN_IMAGE_MASK: others[QWEN_IMAGE_MASK].bool()},
        )[0]
        return unpacked(tokens[:, : height // 2 * (width // 2)], height, width)

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """u + g (c - u), each token as long as that of the prompt alone. Source: QwenImagePipeline of diffusers."""
        own, both = packed(conditional.float()), packed(guided(conditional, unconditional, scale))
        rescaled = both * (own.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
        return unpacked(rescaled, *conditional.shape[-2:])

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        return super().encode_images(vae, pixels).squeeze(2)

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        return super().pixels(vae, latents.unsqueeze(2))


class QwenImageEdit(QwenImage):
    """The text encoder reads the condition image before the text. Its tokens do not count as tokens of the text."""

    num_images = range(1, 2)

    def encoded_shapes(self, model: Config, max_tokens: int, latents: Shape, num_images: int) -> dict[str, Shape]:
        """A token of the image in the text is 28 x 28 pixels, and a number of a latent 8 x 8."""
        max_tokens += math.prod(max(1, round(8 * side / 28)) for side in latents[-2:])
        return super().encoded_shapes(model, max_tokens, latents, num_images)

    def encode_with(
        self, pipeline: Any, text: str, images: Sequence[Image.Image], max_tokens: int
    ) -> dict[str, Tensor]:
        processor = pipeline.processor.image_processor
        grid = processor(images=list(images), return_tensors="np")["image_grid_thw"]
        most = max_tokens + int(grid.prod(-1).sum()) // processor.merge_size**2
        embeds = pipeline.encode_prompt(prompt=[text], image=list(images))[0][:, :most]
        missing = most - embeds.shape[1]
        mask = pad(embeds.new_ones(embeds.shape[:2]), (0, missing))
        return {"encoder_hidden_states": pad(embeds, (0, 0, 0, missing)), QWEN_IMAGE_MASK: mask}


class ZImage(PackedFamily):
    """Captions have their own lengths. `guidance` is the pipeline's `guidance_scale`, c + g (c - u), and 1 is none."""

    lora_targets = ATTENTION_TARGETS
    text_input, text_mask = CAPTION, CAPTION_MASK

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        [embeds], _ = pipeline.encode_prompt([text], do_classifier_free_guidance=False, max_sequence_length=max_tokens)
        missing = max_tokens - len(embeds)
        mask = pad(embeds.new_ones(1, len(embeds)), (0, missing))
        return {CAPTION: pad(embeds, (0, 0, 0, missing)).unsqueeze(0), CAPTION_MASK: mask}

    def num_cut(self, pipeline: Any, text: str, max_tokens: int) -> int:
        return super().num_cut(pipeline, in_chat(pipeline, text, enable_thinking=True), max_tokens)

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        fit(size, 2 * factor)
        return (model["in_channels"], size.height // factor, size.width // factor)

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        pairs = zip(conditions[CAPTION], conditions[CAPTION_MASK].bool(), strict=True)
        captions = [embeds[mask] for embeds, mask in pairs]
        images = list(latents.unsqueeze(2).unbind())
        return -torch.stack(model(images, 1 - timesteps / 1000, captions, return_dict=False)[0]).squeeze(2)

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        return guided(conditional, unconditional, 1 + scale)


class Flux2(PackedFamily):
    """FLUX.2 klein; a distilled one takes no negative prompt, so its guidance is 1. Condition images are further tokens
    with other times. Latents are tiles of 2 x 2: [4 C, H/2, W/2]."""

    num_images = range(11)
    crops_images = True

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        embeds, _ = pipeline.encode_prompt(prompt=text, max_sequence_length=max_tokens)
        return {"encoder_hidden_states": embeds}

    def num_cut(self, pipeline: Any, text: str, max_tokens: int) -> int:
        return super().num_cut(pipeline, in_chat(pipeline, text, enable_thinking=False), max_tokens)

    def latent_shape(self, model: Config, vae: Config, size: ImageSize) -> tuple[int, ...]:
        factor = 2 ** len(vae["block_out_channels"])
        fit(size, factor)
        return (model["in_channels"], size.height // factor, size.width // factor)

    def schedule(self, scheduler: Any, num_steps: int, shape: tuple[int, ...]) -> Schedule:
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        shift = compute_empirical_mu(image_seq_len=shape[-2] * shape[-1], num_steps=num_steps)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=shift)
        return Schedule(scheduler.sigmas, scheduler.timesteps.float())

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        parts, others = with_images(latents, conditions)
        sides = [torch.arange(side, device=latents.device) for side in (*latents.shape[-2:], 1)]
        ids = torch.cat([torch.cartesian_prod(sides[0].new_tensor([10 * n]), *sides) for n in range(len(parts))])
        text = torch.arange(others["encoder_hidden_states"].shape[1], device=latents.device)
        text_ids = torch.stack([torch.zeros_like(text)] * 3 + [text], 1)
        tokens = model(
            hidden_states=torch.cat([part.flatten(2).transpose(1, 2) for part in parts], 1),
            timestep=(timesteps / 1000).to(latents.dtype),
            txt_ids=text_ids.expand(len(latents), -1, -1),
            img_ids=ids.expand(len(latents), -1, -1),
            return_dict=False,
            **others,
        )[0]
        return tokens[:, : latents[0, 0].numel()].transpose(1, 2).reshape_as(latents)

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = _normalisation(vae)
        tiles = nn.functional.pixel_shuffle(latents * std + mean, 2)
        return vae.decode(tiles.to(vae.dtype), return_dict=False)[0].unsqueeze(2)

    def encode_images(self, vae: Any, pixels: np.ndarray) -> Tensor:
        mean, std = _normalisation(vae)
        tiles = nn.functional.pixel_unshuffle(vae.encode(of_levels(vae, pixels)).latent_dist.mode(), 2)
        return (tiles - mean) / std


def _normalisation(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of tiles, [1, 4 C, 1, 1]."""
    norm = vae.bn
    variance = norm.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps
    return norm.running_mean.view(1, -1, 1, 1), variance.sqrt()


def in_chat(pipeline: Any, text: str, **own: Any) -> str:
    """A text as the question of a chat, for pipelines whose text encoder is a language model."""
    asked = [{"role": "user", "content": text}]
    return pipeline.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **own)


SANA_MASK = "encoder_attention_mask"


class Sana(FlowFamily):
    """Prompts are encoded as they are, without the pipeline's instruction to embellish them."""

    is_exact = False
    text_mask = SANA_MASK

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


WAN_CONDITION, WAN_TEXT_TOKENS, WAN_IMAGE_TOKENS = "condition_video", 512, 257


class WanImageToVideo(Wan):
    """The condition image is the first frame, as further channels, and for Wan 2.1 also encoded by a CLIP."""

    num_images = range(1, 2)

    def encoded_shapes(self, model: Config, max_tokens: int, latents: Shape, num_images: int) -> dict[str, Shape]:
        found = super().encoded_shapes(model, WAN_TEXT_TOKENS, latents, num_images=0)
        seen = {"encoder_hidden_states_image": (WAN_IMAGE_TOKENS, model["image_dim"])} if model["image_dim"] else {}
        return {**found, **seen, WAN_CONDITION: (model["in_channels"] - latents[0], *latents[1:])}

    def encode(self, pipeline: Any, text: str, max_tokens: int) -> dict[str, Tensor]:
        """The attention of Wan 2.1 separates text and image behind 512 tokens, whatever `max_tokens` is. The text
        pipeline encodes the same, also without the package ftfy."""
        from diffusers import WanPipeline

        parts = {"tokenizer": pipeline.tokenizer, "text_encoder": pipeline.text_encoder}
        return super().encode(WanPipeline(**parts, vae=None, scheduler=None), text, WAN_TEXT_TOKENS)

    def num_cut(self, pipeline: Any, text: str, max_tokens: int) -> int:
        return super().num_cut(pipeline, text, WAN_TEXT_TOKENS)

    def encode_conditions(self, pipeline: Any, vae: Any, images: np.ndarray, size: ImageSize) -> dict[str, Tensor]:
        """[1, 4 + C, F, H, W]: which frames are given, and the latents of the image followed by grey frames."""
        frame = of_levels(vae, images).unsqueeze(2)
        video = torch.cat([frame, frame.new_zeros(1, 3, size.num_frames - 1, *frame.shape[-2:])], 2)
        mean, std = statistics(vae, frame.device)
        latents = (vae.encode(video).latent_dist.mode() - mean) / std
        is_given = latents.new_zeros(1, 2 ** sum(vae.config.temperal_downsample), *latents.shape[2:])
        is_given[:, :, 0] = 1
        found = {WAN_CONDITION: torch.cat([is_given, latents], 1)}
        if pipeline.image_encoder is not None:
            found["encoder_hidden_states_image"] = pipeline.encode_image(Image.fromarray(images[0]))
        return found

    def velocity(
        self, model: nn.Module, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        others = {name: value for name, value in conditions.items() if name != WAN_CONDITION}
        inputs = torch.cat([latents, conditions[WAN_CONDITION]], 1)
        return super().velocity(model, inputs, timesteps, others, guidance)


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
TRANSFORMER, _ = NETWORKS  # the folder of the network that is trained, and its name in a pipeline

FAMILIES: dict[str, FlowFamily] = {
    "StableDiffusion3Pipeline": StableDiffusion3(),
    "StableDiffusion3Img2ImgPipeline": StableDiffusion3(),
    "FluxPipeline": Flux(),
    "FluxKontextPipeline": FluxKontext(),
    "Flux2KleinPipeline": Flux2(),
    "QwenImagePipeline": QwenImage(),
    "QwenImageEditPipeline": QwenImageEdit(),
    "ZImagePipeline": ZImage(),
    "SanaPipeline": Sana(),
    "WanPipeline": Wan(),
    "WanImageToVideoPipeline": WanImageToVideo(),
    "Cosmos2TextToImagePipeline": CosmosPredict2(),
    "Cosmos2_5_PredictBasePipeline": CosmosPredict25(),
}

_TAKES_VIDEOS = "it is conditioned on a video, and a row of a flow model has a text and images"
REFUSED: dict[str, str] = {
    "WanVideoToVideoPipeline": _TAKES_VIDEOS,
    "WanVACEPipeline": _TAKES_VIDEOS,
    "Cosmos2VideoToWorldPipeline": _TAKES_VIDEOS,
    "CosmosTextToWorldPipeline": "Cosmos Predict 1 predicts noise on EDM levels; use Cosmos Predict 2 or 2.5",
    "Flux2Pipeline": "its text encoder, a Mistral 3 of 30 layers or more, was not measured; use FLUX.2 klein",
    "QwenImageEditPlusPipeline": "it scales each image by two rules, which are not computed here",
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
