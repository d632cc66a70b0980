"""InternVL 3 and 3.5 in the Hugging Face format: tiles of one size, framed by two tokens; a frame is one tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor, InternVLProcessor, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.utils import ModelOutput

from mobula.configs.schema import DataConfig
from mobula.configs.schema.data import VideoConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families.base import Clip, Size, VideoFamily
from mobula.learner.policies.families.vision import VisionFamily, image_settings, interleaved, place, refuse_long


class InternVL(VisionFamily, VideoFamily):
    """Source: arXiv:2504.10479, arXiv:2508.18265.

    `pixel_values` of an image is float32 [tiles, 3, H, W], `pixel_values_videos` float32 [frames, 3, H, W]. A video
    has the number of each frame as text, tokenised apart from the text in front of it, as engines do, and embeddings in
    the places of the token of images.
    """

    model_types = ("internvl",)
    media_tokens = r"<img>|</img>|<IMG_CONTEXT>|<video>"
    engine_video_token = "<video>"
    parts = {
        "vision": ("vision_tower.",),
        "connector": ("multi_modal_projector.",),
        "language": ("language_model.",),
    }

    def processor_options(self, model: str, data: DataConfig) -> dict[str, Any]:
        """The number of tiles that have at most `data.max_pixels` together, or one. The image as a whole is one tile
        more."""
        images = AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
        bounded = max(1, data.max_pixels // (images.size["height"] * images.size["width"]))
        if bounded >= images.max_patches:
            return {}
        return {"max_patches": bounded, "min_patches": min(images.min_patches, bounded)}

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        assert isinstance(processor, InternVLProcessor)
        width, height = size
        num_tiles = processor.image_processor.get_number_of_image_patches(height, width, image_settings(processor))
        placeholders = np.full(processor.image_seq_length * num_tiles, processor.image_token_id)
        frame = (processor.start_image_token_id, processor.end_image_token_id)
        return np.array([frame[0], *placeholders, frame[1]], dtype=np.int32)

    def video_placeholder_id(self, config: PreTrainedConfig) -> int:
        return self.placeholder_id(config)

    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        assert isinstance(processor, InternVLProcessor)
        num_frames = len(clip.timestamps)
        refuse_long(clip, num_frames * processor.image_seq_length, limits)
        text = processor.replace_video_token({"pixel_values_videos": [np.empty(num_frames)]}, 0)
        return np.array(processor.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    def process_video(
        self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig
    ) -> dict[str, np.ndarray]:
        tile = processor.image_processor.size  # that of the video processor may not be the tower's
        made = processor.video_processor(
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            do_sample_frames=False,
            size={"height": tile.height, "width": tile.width},
            return_tensors="pt",
        )
        return {"pixel_values_videos": made["pixel_values_videos"][0].numpy()}

    def engine_inputs(
        self, config: PreTrainedConfig, images: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray | list[np.ndarray]]:
        kind = "video" if "pixel_values_videos" in images[0] else "image"
        num_tiles = [next(iter(image.values())).shape[0] for image in images]
        return super().engine_inputs(config, images) | {
            f"{kind}_num_patches": np.array(num_tiles),
            f"{kind}_token_id": np.array(config.image_token_id),
        }

    def encode_all(
        self, core: PreTrainedModel, config: PreTrainedConfig, batch: TokenBatch, ranks: SequenceRanks | None
    ) -> dict[str, ModelOutput]:
        if not batch.videos.inputs:
            return super().encode_all(core, config, batch, ranks)
        frames = batch.videos.inputs["pixel_values_videos"]  # [frames of all videos, 3, H, W]
        tiles = batch.media.inputs.get("pixel_values", frames[:0])
        inputs = {"pixel_values": torch.cat([tiles, frames])}
        together = self.encode_shared(core, config, batch, ranks, inputs, [batch.media, batch.videos])
        encoded = {"image": copy(together), "video": copy(together)}
        encoded["image"]["pooler_output"] = together["pooler_output"][: len(tiles)]
        encoded["video"]["pooler_output"] = together["pooler_output"][len(tiles) :]
        place(encoded["video"], batch.videos)
        if not batch.media.inputs:
            return {"video": encoded["video"]}
        place(encoded["image"], batch.media)
        return encoded

    def as_taken(self, encoded: dict[str, ModelOutput], token_types: Tensor) -> dict[str, ModelOutput]:
        if "video" not in encoded:
            return encoded
        taken = copy(encoded["video"])
        taken["pooler_output"] = interleaved(encoded, token_types)[None]
        return {"image": taken}

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        vision = config.vision_config
        return {"pixel_values": torch.zeros(1, vision.num_channels, *vision.image_size, device=device)}
