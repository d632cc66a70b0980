"""LLaVA-OneVision: a whole picture and its tiles at the best of several resolutions, a token at each end of a line."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, ProcessorMixin
from transformers.utils import ModelOutput

from learner.policies.families.base import Size
from learner.policies.families.vision import VisionFamily


class LlavaOneVision(VisionFamily):
    """Source: arXiv:2408.03326. Every picture is cut into tiles, however many a prompt has.

    `pixel_values` is float32 [1, tiles, 3, H, W], `image_sizes` int64 [1, 2] (height, width).
    """

    model_types = ("llava_onevision",)
    media_tokens = r"<image>|<video>"
    parts = {
        "vision": ("vision_tower.",),
        "connector": ("multi_modal_projector.", "image_newline"),
        "language": ("language_model.",),
    }
    picture_inputs = ("pixel_values", "image_sizes")

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        width, height = size
        [num_tokens] = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"]
        return np.full(num_tokens, processor.image_token_id, dtype=np.int32)

    def encode(self, core: nn.Module, inputs: Mapping[str, Tensor]) -> ModelOutput:
        if core.image_newline.numel() == 0:  # it is held by the base itself, whose forward gathers it too late
            raise ValueError(
                f"learner.zero_stage=3 partitions image_newline of {type(core).__name__}, which is used outside of the "
                "module that gathers it: set learner.zero_stage=2, or learner=fsdp2"
            )
        return super().encode(core, inputs)

    def blank_picture(self, config: PreTrainedConfig, device: torch.device) -> dict[str, torch.Tensor]:
        """One tile and the whole."""
        side = config.vision_config.image_size
        return {
            "pixel_values": torch.zeros(1, 2, config.vision_config.num_channels, side, side, device=device),
            "image_sizes": torch.tensor([[side, side]], device=device),
        }
