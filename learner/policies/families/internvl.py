"""InternVL 3 and 3.5 in the Hugging Face format: tiles of one size, framed by two tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedConfig, ProcessorMixin

from learner.policies.families.base import Size
from learner.policies.families.vision import VisionFamily


class InternVL(VisionFamily):
    """Source: arXiv:2504.10479, arXiv:2508.18265. `pixel_values` of a picture is float32 [tiles, 3, H, W]."""

    model_types = ("internvl",)
    media_tokens = r"<img>|</img>|<IMG_CONTEXT>|<video>"
    parts = {
        "vision": ("vision_tower.",),
        "connector": ("multi_modal_projector.",),
        "language": ("language_model.",),
    }

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        width, height = size
        num_tiles = processor.image_processor.get_number_of_image_patches(height, width, {})
        places = np.full(processor.image_seq_length * num_tiles, processor.image_token_id)
        frame = (processor.start_image_token_id, processor.end_image_token_id)
        return np.array([frame[0], *places, frame[1]], dtype=np.int32)

    def engine_inputs(
        self, config: PreTrainedConfig, pictures: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        num_tiles = [picture["pixel_values"].shape[0] for picture in pictures]
        return super().engine_inputs(config, pictures) | {
            "image_num_patches": np.array(num_tiles),
            "image_token_id": np.array(config.image_token_id),
        }

    def blank_picture(self, config: PreTrainedConfig, device: torch.device) -> dict[str, torch.Tensor]:
        vision = config.vision_config
        return {"pixel_values": torch.zeros(1, vision.num_channels, *vision.image_size, device=device)}
