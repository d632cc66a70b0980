"""LLaVA-OneVision: a whole image and its tiles at the best of several resolutions, a token at each end of a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from math import ceil, isqrt

import numpy as np
import torch
from torch import Tensor
from transformers import LlavaOnevisionProcessor, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches
from transformers.utils import ModelOutput

from mobula.configs.schema.data import VideoConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families.base import Clip, Size, VideoFamily
from mobula.learner.policies.families.vision import VisionFamily, method, place, refuse_long


class LlavaOneVision(VisionFamily, VideoFamily):
    """Source: arXiv:2408.03326. Every image is cut into tiles, however many a prompt has; a frame is one tile, whose
    tokens are pooled to a quarter.

    `pixel_values` is float32 [1, tiles, 3, H, W], `image_sizes` int64 [1, 2] (height, width), `pixel_values_videos`
    float32 [frames, 3, H, W].
    """

    model_types = ("llava_onevision",)
    media_tokens = r"<image>|<video>"
    parts = {
        "vision": ("vision_tower.",),
        "connector": ("multi_modal_projector.", "image_newline"),
        "language": ("language_model.",),
    }
    note = (
        "`data.max_pixels` has no effect: the model finds tiles by `image_grid_pinpoints` of its config.json, so a "
        "smaller budget needs images that are smaller files"
    )
    image_inputs = ("pixel_values", "image_sizes")

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        assert isinstance(processor, LlavaOnevisionProcessor)
        width, height = size
        [num_tokens] = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"]
        return np.full(num_tokens, processor.image_token_id, dtype=np.int32)

    def placeholder_ids(self, config: PreTrainedConfig) -> tuple[int, ...]:
        return self.placeholder_id(config), self.video_placeholder_id(config)

    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        assert isinstance(processor, LlavaOnevisionProcessor)
        side = ceil(isqrt(processor.num_image_tokens) / 2)
        num_tokens = len(clip.timestamps) * side**2 + 1
        refuse_long(clip, num_tokens, limits)
        return np.full(num_tokens, processor.video_token_id, dtype=np.int32)

    def process_video(
        self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig
    ) -> dict[str, np.ndarray]:
        videos = [torch.from_numpy(frames).permute(0, 3, 1, 2)]
        made = processor.video_processor(videos=videos, do_sample_frames=False, return_tensors="pt")
        return {"pixel_values_videos": made["pixel_values_videos"][0].numpy()}

    def engine_inputs(
        self, config: PreTrainedConfig, images: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray | list[np.ndarray]]:
        if "pixel_values_videos" not in images[0]:
            return super().engine_inputs(config, images)
        return {"pixel_values_videos": [video["pixel_values_videos"] for video in images]}

    def encode_all(
        self, core: PreTrainedModel, config: PreTrainedConfig, batch: TokenBatch, ranks: SequenceRanks | None
    ) -> dict[str, ModelOutput]:
        """Tiles and frames in one call of the tower: a frame goes in as an image of a prompt with many, which has one
        tile and the token at the end of a line behind it."""
        if not batch.videos.inputs:
            return super().encode_all(core, config, batch, ranks)
        frames = batch.videos.inputs["pixel_values_videos"]  # [frames of all videos, 3, H, W]
        tiles, sizes = self._tiles(config, batch)
        together = self.encode(
            core,
            {
                "pixel_values": torch.cat([*tiles, frames, frames[:1]]),  # one more, so that there are several
                "image_sizes": torch.cat([sizes, sizes.new_ones(len(frames) + 1, 2)]),
                "batch_num_images": torch.tensor([1] * len(sizes) + [len(frames) + 1]),
            },
        )
        features = together["pooler_output"][len(sizes) : -1]
        end_of_line = features[0][-1:]
        pooled = method(core, "apply_pooling")(
            torch.stack([frame[:-1] for frame in features])
        )  # [frames, tokens / 4, H]
        videos = [torch.cat([video.flatten(0, 1), end_of_line]) for video in pooled.split(list(batch.videos.num_parts))]
        encoded = {"image": copy(together), "video": copy(together)}
        encoded["image"]["pooler_output"] = together["pooler_output"][: len(sizes)]
        encoded["video"]["pooler_output"] = torch.cat([videos[i] for i in batch.videos.order])[None]
        if not len(sizes):
            return {"video": encoded["video"]}
        place(encoded["image"], batch.media)
        return encoded

    def _tiles(self, config: PreTrainedConfig, batch: TokenBatch) -> tuple[list[Tensor], Tensor]:
        """The tiles of each unique image without padding, and int64 [images, 2]: their sizes."""
        if not batch.media.inputs:
            return [], torch.empty(0, 2, dtype=torch.int64, device=batch.input_ids.device)
        sizes, side = batch.media.inputs["image_sizes"], config.vision_config.image_size
        counts = [image_size_to_num_patches(size, config.image_grid_pinpoints, side) for size in sizes]
        pixels = batch.media.inputs["pixel_values"]
        return [image[:count] for image, count in zip(pixels, counts, strict=True)], sizes

    def encode(self, core: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
        if (
            core.get_parameter("image_newline").numel() == 0
        ):  # it is held by the base itself, whose forward gathers it too late
            raise ValueError(
                f"learner.zero_stage=3 partitions image_newline of {type(core).__name__}, which is used outside of the "
                "module that gathers it: set learner.zero_stage=2, or learner=fsdp2"
            )
        return super().encode(core, inputs)

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, torch.Tensor]:
        """One tile and the whole."""
        side = config.vision_config.image_size
        return {
            "pixel_values": torch.zeros(1, 2, config.vision_config.num_channels, side, side, device=device),
            "image_sizes": torch.tensor([[side, side]], device=device),
        }
