"""The other vision families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from math import ceil, isqrt
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.glm4v.image_processing_glm4v import smart_resize as scaled_image
from transformers.models.glm4v.video_processing_glm4v import smart_resize
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches
from transformers.utils import ModelOutput

from mobula.configs.schema import DataConfig
from mobula.configs.schema.data import VideoConfig
from mobula.configs.schema.rollout import SamplerKind
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families.base import Arrays, Clip, EngineInputs, Size, VideoFamily
from mobula.learner.policies.families.vision import (
    VISUAL_PARTS,
    Encoded,
    LongVideos,
    PatchProcessor,
    VisionFamily,
    changed,
    image_settings,
    interleaved,
    method,
    placed,
    refuse_long,
    submodel,
    tower_inputs,
)


def processed_frames(processor: ProcessorMixin, frames: np.ndarray, **own: Any) -> Arrays:
    videos = [torch.from_numpy(frames).permute(0, 3, 1, 2)]
    made = processor.video_processor(videos=videos, do_sample_frames=False, return_tensors="pt", **own)
    return {"pixel_values_videos": made["pixel_values_videos"][0].numpy()}


MASKED = ("sdpa", "eager")  # attention of transformers that takes a mask of any form


class Gemma3(VisionFamily):
    """Source: arXiv:2503.19786.

    vLLM's attention on CPU ignores the mask of images without an error (0.01 nat apart), so a run with it takes text
    alone. The prompt's placeholder is another token than the one whose places embeddings take.
    """

    model_types = ("gemma3",)
    media_tokens = r"<start_of_image>|<end_of_image>|<image_soft_token>"
    parts = {"vision": ("vision_tower.",), "connector": ("multi_modal_projector.",), "language": ("language_model.",)}
    needs_gate = True
    padded_because = "its images need a mask; learner.packing=true packs rows of text alone"
    on_cpu = "text alone with vLLM, which ignores the mask of images (0.01 nat); with `sampler=huggingface` images too"

    def without_images_on(self, device: str, sampler: str) -> str:
        if (device, sampler) != ("cpu", SamplerKind.VLLM):
            return ""
        return (
            "policy.model is a Gemma 3, whose images are refused with resources.device=cpu and sampler=vllm: vLLM on "
            "CPU ignores their bidirectional attention (use a GPU, or sampler=huggingface)"
        )

    def compact_placeholder_id(self, config: PreTrainedConfig) -> int:
        return int(config.boi_token_index)

    def spaced(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """With a blank line on each side of an image, which may become one token with the line ends next to it."""
        return text.replace(tokenizer.boi_token, f"\n\n{tokenizer.boi_token}\n\n")

    def refuse_unfit(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        if processor.image_processor.do_pan_and_scan:
            raise ValueError(
                "policy.model is a Gemma 3 whose preprocessor_config.json has do_pan_and_scan=true, for which engines "
                "attend otherwise: set it to false"
            )

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        assert isinstance(processor, hf.Gemma3Processor)
        tokenizer = processor.tokenizer
        placeholders = np.full(processor.image_seq_length, tokenizer.image_token_id)
        return np.array([tokenizer.boi_token_id, *placeholders, tokenizer.eoi_token_id], dtype=np.int32)

    def engine_inputs(self, config: PreTrainedConfig, images: Sequence[Arrays]) -> EngineInputs:
        num_parts = [image["pixel_values"].shape[0] for image in images]
        return super().engine_inputs(config, images) | {"num_patches": np.array(num_parts)}

    def generate_inputs(self, model: PreTrainedModel, token_types: Tensor) -> dict[str, Tensor]:
        return {"token_type_ids": token_types}

    def decoder_inputs(self, core: PreTrainedModel, batch: TokenBatch, token_types: Tensor) -> dict[str, Tensor]:
        attention = core.config.get_text_config()._attn_implementation
        if batch.media.inputs and attention not in MASKED:
            raise ValueError(
                f"policy.model is a Gemma 3, whose images need a mask that the attention {attention} does not take: "
                "set policy.attention=sdpa, learner.packing=false and learner.sequence_parallel=1"
            )
        # Rows of text alone are causal, which every attention computes without a mask.
        return {"token_type_ids": token_types.to(batch.input_ids.device)} if batch.media.inputs else {}

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        vision = config.vision_config
        side = vision.image_size
        return {"pixel_values": torch.zeros(1, vision.num_channels, side, side, device=device)}


class Glm4v(LongVideos):
    """Source: arXiv:2507.01006. A video has the whole second of each pair of frames as text behind its embeddings, and
    these in the places of the token of images."""

    model_types = ("glm4v",)
    media_tokens = r"<\|(image|video|begin_of_image|end_of_image|begin_of_video|end_of_video)\|>"
    parts = VISUAL_PARTS
    video_options = {}
    smart_resize = staticmethod(smart_resize)

    def processor_options(self, model: str, data: DataConfig) -> dict[str, Any]:
        # Its image processor ignores `min_pixels` and `max_pixels`.
        return {"size": {"shortest_edge": data.min_pixels, "longest_edge": data.max_pixels}}

    def scaled_size(self, images: PatchProcessor, height: int, width: int) -> tuple[int, int]:
        factor, frames = images.patch_size * images.merge_size, images.temporal_patch_size
        bounds = images.size["shortest_edge"], images.size["longest_edge"]
        return scaled_image(frames, height, width, frames, factor, *bounds)

    def video_placeholder_id(self, config: PreTrainedConfig) -> int:
        return self.placeholder_id(config)

    def placeholder_ids(self, config: PreTrainedConfig) -> tuple[int, ...]:
        return (self.placeholder_id(config),)

    def encode(self, core: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
        """Images are videos of one pair of frames: the tower sees each pair alone."""
        pixels, grids = inputs["pixel_values"], inputs["image_grid_thw"]
        worked_out = tower_inputs(submodel(core, "visual"), grids, pixels.device)
        # Its position embeddings are sampled at the sizes of the grids, on the device.
        return method(core, "get_video_features")(pixels, grids.to(pixels.device), **worked_out, return_dict=True)

    def as_taken(self, encoded: Encoded, token_types: Tensor) -> Encoded:
        """As images: the model's forward() looks for the token of images, and would put videos over them."""
        if "video" not in encoded:
            return encoded
        taken = copy(encoded["video"])
        taken["pooler_output"] = [interleaved(encoded, token_types)]
        return {"image": taken}


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
        images = hf.AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
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

    def engine_inputs(self, config: PreTrainedConfig, images: Sequence[Arrays]) -> EngineInputs:
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


class InternVL(VisionFamily, VideoFamily):
    """Source: arXiv:2504.10479, arXiv:2508.18265.

    `pixel_values` of an image is float32 [tiles, 3, H, W], `pixel_values_videos` float32 [frames, 3, H, W]. A video
    has the number of each frame as text, tokenised apart from the text in front of it, as engines do, and embeddings in
    the places of the token of images.
    """

    model_types = ("internvl",)
    media_tokens = r"<img>|</img>|<IMG_CONTEXT>|<video>"
    engine_video_token = "<video>"
    parts = {"vision": ("vision_tower.",), "connector": ("multi_modal_projector.",), "language": ("language_model.",)}

    def processor_options(self, model: str, data: DataConfig) -> dict[str, Any]:
        """The number of tiles that have at most `data.max_pixels` together, or one. The image as a whole is one tile
        more."""
        images = hf.AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
        bounded = max(1, data.max_pixels // (images.size["height"] * images.size["width"]))
        if bounded >= images.max_patches:
            return {}
        return {"max_patches": bounded, "min_patches": min(images.min_patches, bounded)}

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        assert isinstance(processor, hf.InternVLProcessor)
        width, height = size
        num_tiles = processor.image_processor.get_number_of_image_patches(height, width, image_settings(processor))
        placeholders = np.full(processor.image_seq_length * num_tiles, processor.image_token_id)
        frame = (processor.start_image_token_id, processor.end_image_token_id)
        return np.array([frame[0], *placeholders, frame[1]], dtype=np.int32)

    def video_placeholder_id(self, config: PreTrainedConfig) -> int:
        return self.placeholder_id(config)

    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        assert isinstance(processor, hf.InternVLProcessor)
        num_frames = len(clip.timestamps)
        refuse_long(clip, num_frames * processor.image_seq_length, limits)
        text = processor.replace_video_token({"pixel_values_videos": [np.empty(num_frames)]}, 0)
        return np.array(processor.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    def process_video(self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig) -> Arrays:
        tile = processor.image_processor.size  # that of the video processor may not be the tower's
        return processed_frames(processor, frames, size={"height": tile.height, "width": tile.width})

    def engine_inputs(self, config: PreTrainedConfig, images: Sequence[Arrays]) -> EngineInputs:
        kind = "video" if "pixel_values_videos" in images[0] else "image"
        num_tiles = [next(iter(image.values())).shape[0] for image in images]
        return super().engine_inputs(config, images) | {
            f"{kind}_num_patches": np.array(num_tiles),
            f"{kind}_token_id": np.array(config.image_token_id),
        }

    def encode_all(self, core: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None) -> Encoded:
        if not batch.videos.inputs:
            return super().encode_all(core, batch, ranks)
        frames = batch.videos.inputs["pixel_values_videos"]  # [frames of all videos, 3, H, W]
        tiles = batch.media.inputs.get("pixel_values", frames[:0])
        inputs = {"pixel_values": torch.cat([tiles, frames])}
        together = self.encode_shared(core, batch, ranks, inputs, [batch.media, batch.videos])
        encoded = {"video": placed(changed(together, itemgetter(slice(len(tiles), None))), batch.videos)}
        if batch.media.inputs:
            encoded["image"] = placed(changed(together, itemgetter(slice(len(tiles)))), batch.media)
        return encoded

    def as_taken(self, encoded: Encoded, token_types: Tensor) -> Encoded:
        if "video" not in encoded:
            return encoded
        taken = copy(encoded["video"])
        taken["pooler_output"] = interleaved(encoded, token_types)[None]
        return {"image": taken}

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        vision = config.vision_config
        return {"pixel_values": torch.zeros(1, vision.num_channels, *vision.image_size, device=device)}


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
    image_inputs = ("pixel_values", "image_sizes")

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        assert isinstance(processor, hf.LlavaOnevisionProcessor)
        width, height = size
        [num_tokens] = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"]
        return np.full(num_tokens, processor.image_token_id, dtype=np.int32)

    def placeholder_ids(self, config: PreTrainedConfig) -> tuple[int, ...]:
        return self.placeholder_id(config), self.video_placeholder_id(config)

    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        assert isinstance(processor, hf.LlavaOnevisionProcessor)
        side = ceil(isqrt(processor.num_image_tokens) / 2)
        num_tokens = len(clip.timestamps) * side**2 + 1
        refuse_long(clip, num_tokens, limits)
        return np.full(num_tokens, processor.video_token_id, dtype=np.int32)

    def process_video(self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig) -> Arrays:
        return processed_frames(processor, frames)

    def engine_inputs(self, config: PreTrainedConfig, images: Sequence[Arrays]) -> EngineInputs:
        if "pixel_values_videos" not in images[0]:
            return super().engine_inputs(config, images)
        return {"pixel_values_videos": [video["pixel_values_videos"] for video in images]}

    def encode_all(self, core: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None) -> Encoded:
        """Tiles and frames in one call of the tower: a frame goes in as an image of a prompt with many, which has one
        tile and the token at the end of a line behind it."""
        if not batch.videos.inputs:
            return super().encode_all(core, batch, ranks)
        frames = batch.videos.inputs["pixel_values_videos"]  # [frames of all videos, 3, H, W]
        tiles, sizes = self._tiles(core.config, batch)
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
        stacked = torch.stack([frame[:-1] for frame in features])
        pooled = method(core, "apply_pooling")(stacked)  # [frames, tokens / 4, H]
        videos = [torch.cat([video.flatten(0, 1), end_of_line]) for video in pooled.split(list(batch.videos.num_parts))]
        encoded = {"video": copy(together)}
        encoded["video"]["pooler_output"] = torch.cat([videos[i] for i in batch.videos.order])[None]
        if len(sizes):
            encoded["image"] = placed(changed(together, itemgetter(slice(len(sizes)))), batch.media)
        return encoded

    def _tiles(self, config: PreTrainedConfig, batch: TokenBatch) -> tuple[list[Tensor], Tensor]:
        """The tiles of each unique image without padding, and int64 [images, 2]: their sizes."""
        if not batch.media.inputs:
            return [], torch.empty(0, 2, dtype=torch.int64, device=batch.input_ids.device)
        sizes, side = batch.media.inputs["image_sizes"], config.vision_config.image_size
        counts = [image_size_to_num_patches(size, config.image_grid_pinpoints, side) for size in sizes]
        return [image[:count] for image, count in zip(batch.media.inputs["pixel_values"], counts, strict=True)], sizes

    def encode(self, core: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
        # The parameter belongs to the base itself, whose forward gathers it too late.
        if core.get_parameter("image_newline").numel() == 0:
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
