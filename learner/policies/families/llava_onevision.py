"""LLaVA-OneVision: a whole picture and its tiles at the best of several resolutions, a token at each end of a line."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedConfig, ProcessorMixin

from learner.policies.families.base import Size
from learner.policies.families.vision import VisionFamily


class LlavaOneVision(VisionFamily):
    """Source: arXiv:2408.03326. Every picture is cut into tiles, however many a prompt has.

    `pixel_values` is float32 [1, tiles, 3, H, W], `image_sizes` int64 [1, 2] (height, width).
    """

    model_types = ("llava_onevision",)
    needs_gate = True  # no conformance run has measured it
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

    def blank_picture(self, config: PreTrainedConfig, device: torch.device) -> dict[str, torch.Tensor]:
        """One tile and the whole."""
        side = config.vision_config.image_size
        return {
            "pixel_values": torch.zeros(1, 2, config.vision_config.num_channels, side, side, device=device),
            "image_sizes": torch.tensor([[side, side]], device=device),
        }
