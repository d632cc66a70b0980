"""Qwen2-VL and Qwen2.5-VL: one placeholder an embedding, M-RoPE positions from the grids of pictures."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

from configs.schema import DataConfig
from learner.policies.batch import TokenBatch
from learner.policies.families.base import Size
from learner.policies.families.vision import VisionFamily

MEDIA_TOKENS = r"<\|(image_pad|video_pad|vision_start|vision_end|vision_pad)\|>"


class GridFamily(VisionFamily):
    """Pictures as rows of patches with a grid (t, h, w), scaled to a budget of pixels; three positions a token."""

    has_pixel_budget = True
    picture_inputs = ("pixel_values", "image_grid_thw")  # float32 [num_patches, patch_dim], int64 [1, 3]

    def processor_options(self, data: DataConfig) -> dict[str, int]:
        return {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        width, height = size
        images = processor.image_processor
        num_patches = images.get_number_of_image_patches(height, width)
        return np.full(num_patches // images.merge_size**2, processor.image_token_id, dtype=np.int32)

    def generate_inputs(self, model: PreTrainedModel, token_types: Tensor) -> dict[str, Tensor]:
        return {"mm_token_type_ids": token_types}

    def decoder_inputs(self, core: nn.Module, batch: TokenBatch, token_types: Tensor) -> dict[str, Tensor]:
        """M-RoPE positions [3, B, S] by the model's own rule.

        Positions depend on where pictures stand and how large they are, not on the tokens: one row a layout is enough.
        Without an attention mask the rule counts on through the padding, which nothing looks at.
        """
        layout = batch.layout
        types = token_types[layout.rows]  # [L, S]
        grids = batch.media.inputs["image_grid_thw"][layout.pictures] if batch.media.inputs else None
        positions, _ = core.get_rope_index(types, mm_token_type_ids=types, image_grid_thw=grids)
        return {"position_ids": positions[:, layout.row_layouts]}

    def blank_picture(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        vision = config.vision_config
        side = vision.spatial_merge_size
        channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(side * side, channels, device=device),
            "image_grid_thw": torch.tensor([[1, side, side]], device=device),
        }


class QwenVL(GridFamily):
    """Source: arXiv:2409.12191, arXiv:2502.13923."""

    model_types = ("qwen2_vl", "qwen2_5_vl")
    media_tokens = MEDIA_TOKENS
    parts = {"vision": ("visual.",), "connector": ("visual.merger.",), "language": ("model.", "lm_head.")}
