"""Images by the pipeline of diffusers itself, from latents that a sampler began with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import is_ftfy_available
from PIL import Image
from torch import Tensor, nn

from mobula.learner.policies.adapters import DIFFUSERS_FILE, SECOND
from mobula.learner.policies.flow.family import packed
from mobula.learner.policies.flow.policy import Denoising


@dataclass(frozen=True)
class PlainCall:
    """Arguments of a pipeline's call."""

    guidance: str = "guidance_scale"
    negative: bool = True  # whether it takes a negative prompt
    packs: bool = False  # whether its latents are tokens of 2 x 2
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt with its condition images."""

    text: str
    images: Sequence[Image.Image] = ()


CALLS: dict[str, PlainCall] = {
    "StableDiffusion3Pipeline": PlainCall(),
    "StableDiffusion3Img2ImgPipeline": PlainCall(),
    "FluxPipeline": PlainCall(negative=False, packs=True),
    "FluxKontextPipeline": PlainCall(negative=False, packs=True, own={"_auto_resize": False, "max_area": 32 * 32}),
    "Flux2KleinPipeline": PlainCall(negative=False),
    "QwenImageEditPipeline": PlainCall("true_cfg_scale", packs=True),
    "ZImagePipeline": PlainCall(),
    "QwenImagePipeline": PlainCall("true_cfg_scale", packs=True),
    "SanaPipeline": PlainCall(own={"use_resolution_binning": False, "complex_human_instruction": None}),
    "WanPipeline": PlainCall(),
    "WanImageToVideoPipeline": PlainCall(),
    "Cosmos2TextToImagePipeline": PlainCall(),
    "Cosmos2_5_PredictBasePipeline": PlainCall(),
}


class NoSafetyChecker(nn.Module):
    """Replaces the safety checker of Cosmos pipelines for known prompts."""

    dtype, device = torch.float32, torch.device("cpu")

    def check_text_safety(self, text: str) -> bool:
        return True

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        return frames


def _of_first_order(scheduler: Any, num_steps: int) -> Any:
    """Returns a scheduler that integrates the ODE with Euler steps at the same noise levels, as the sampler does.

    UniPC and DPMSolver are multistep solvers; their first order without corrector is an Euler step of the flow.
    """
    if "solver_order" not in scheduler.config:
        return scheduler
    own: dict[str, Any] = {"solver_order": 1}
    if "disable_corrector" in scheduler.config:
        own["disable_corrector"] = list(range(num_steps))
    return type(scheduler).from_config(scheduler.config, **own)


def plain_frames(
    folder: Path,
    prompt: PlainPrompt,
    latents: Tensor,
    denoising: Denoising,
    max_text_tokens: int,
    adapters: Path | None = None,
) -> np.ndarray:
    """uint8 [F, H, W, 3]: what the pipeline in `folder` makes of `latents` [1, ...], with a LoRA if one is named."""
    is_checked = "safety_checker" in (folder / "model_index.json").read_text(encoding="utf-8")
    pipeline: Any = DiffusionPipeline.from_pretrained(
        str(folder), **({"safety_checker": NoSafetyChecker()} if is_checked else {})
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = _of_first_order(pipeline.scheduler, denoising.num_steps)
    if adapters is not None and hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(str(adapters))
        if (second := adapters / SECOND).is_dir():
            pipeline.load_lora_weights(str(second), load_into_transformer_2=True)
    elif adapters is not None:
        pipeline.transformer.load_lora_adapter(str(adapters), weight_name=DIFFUSERS_FILE, use_safetensors=True)
    call = CALLS[type(pipeline).__name__]
    module: Any = sys.modules[type(pipeline).__module__]
    if rule := getattr(module, "calculate_dimensions", None):
        area = denoising.height * denoising.width  # the pipeline's own area is a megapixel
        module.calculate_dimensions = lambda _, ratio: rule(area, ratio)
    if hasattr(getattr(pipeline, "image_processor", None), "check_image_input"):  # condition images of 64 x 64 and more
        pipeline.image_processor.check_image_input = lambda image: image
    if not is_ftfy_available():  # the text-to-video pipeline leaves texts as they are then, this one fails
        module.ftfy = SimpleNamespace(fix_text=str)
    size = {"height": denoising.height, "width": denoising.width}
    result = pipeline(
        prompt=prompt.text,
        latents=packed(latents) if call.packs else latents,
        num_inference_steps=denoising.num_steps,
        max_sequence_length=max_text_tokens,
        **{call.guidance: denoising.guidance},
        **({"negative_prompt": ""} if call.negative else {}),
        **({"num_frames": denoising.num_frames, "output_type": "pil"} if denoising.num_frames > 1 else {}),
        **({"image": prompt.images[0] if len(prompt.images) == 1 else list(prompt.images)} if prompt.images else {}),
        **({"strength": denoising.strength} if denoising.strength < 1 else {}),
        **size,
        **call.own,
    )
    frames = result.images[:1] if hasattr(result, "images") else result.frames[0]
    return np.stack([np.asarray(frame) for frame in frames])
