"""Idefics 3 and SmolVLM: images in rows and columns of tiles, each behind tokens that name its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedConfig, ProcessorMixin

from mobula.configs.schema import DataConfig
from mobula.learner.policies.families.base import Size
from mobula.learner.policies.families.vision import VisionFamily


class Idefics(VisionFamily):
    """Source: arXiv:2408.12637, arXiv:2504.05299.

    `pixel_values` is float32 [tiles, 3, H, W], `pixel_attention_mask` int64 [tiles, H, W], of an image as of several;
    forward() wants an axis of rows before both.
    """

    model_types = ("idefics3", "smolvlm")
    media_tokens = r"<fake_token_around_image>|<image>|<global-img>|<row_\d+_col_\d+>|<video>"
    parts = {
        "vision": ("model.vision_model.",),
        "connector": ("model.connector.",),
        "language": ("model.text_model.", "lm_head."),
    }
    image_inputs = ("pixel_values", "pixel_attention_mask")

    def processor_options(self, model: str, data: DataConfig) -> dict[str, Any]:
        """The longest edge that images are scaled to, small ones too: whole tiles, which together have at most
        `data.max_pixels`, or one tile. The image as a whole is one tile more."""
        images = AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
        tile, longest = images.max_image_size["longest_edge"], images.size["longest_edge"]
        bounded = tile * max(1, isqrt(data.max_pixels) // tile)
        return {"size": {"longest_edge": bounded}} if bounded < longest else {}

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        width, height = size
        _, rows, columns = processor.image_processor.get_number_of_image_patches(height, width, {})
        text = processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        return np.array(processor.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    def process(self, processor: ProcessorMixin, image: Image.Image) -> dict[str, np.ndarray]:
        return {name: array[0] for name, array in super().process(processor, image).items()}

    def engine_inputs(
        self, config: PreTrainedConfig, images: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray | list[np.ndarray]]:
        num_tiles = [image["pixel_values"].shape[0] for image in images]
        return super().engine_inputs(config, images) | {"num_patches": np.array(num_tiles)}

    def forward_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[None] for name, tensor in inputs.items()}

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        vision = config.vision_config
        side = vision.image_size
        return {
            "pixel_values": torch.ones(1, vision.num_channels, side, side, device=device),
            "pixel_attention_mask": torch.ones(1, side, side, dtype=torch.int64, device=device),
        }
