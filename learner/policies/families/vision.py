"""Vision-language models of transformers: one vision call on unique images, placed by the model's own forward()."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from inspect import signature
from itertools import groupby
from math import ceil
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as scaled_image
from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_vl_smart_resize
from transformers.utils import ModelOutput
from transformers.video_utils import VideoMetadata
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from mobula.configs.schema import DataConfig
from mobula.configs.schema.data import VideoConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import MediaBatch, TokenBatch
from mobula.learner.policies.families.base import Arrays, Clip, ImageFamily, Size, VideoFamily

MODALITIES = ("image", "video")  # the n-th modality has token type n
Encoded = dict[str, ModelOutput]  # modality -> features


def takes_encoded_images(core: type[nn.Module]) -> bool:
    """Whether forward() of this class has `mm_encoder_outputs`; older ones ignore it, as any unknown argument."""
    return "mm_encoder_outputs" in signature(core.forward).parameters


class VisionFamily(ImageFamily):
    """A model whose base takes `mm_encoder_outputs`: the results of `get_image_features`.

    Each unique image of a batch is encoded once, and its features are repeated for every placeholder run of the image.
    The model inserts features, and other image inputs of its decoder, at the placeholder tokens, row by row.
    """

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        """Runs the processor on a black image of this size."""
        blank = Image.new("RGB", size)
        images = processor.image_processor(images=[blank], return_tensors="pt", **image_settings(processor))
        text = processor.replace_image_token(images, 0)
        return np.array(processor.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    def process(self, processor: ProcessorMixin, image: Image.Image) -> dict[str, np.ndarray]:
        made = processor.image_processor(images=[image], return_tensors="pt", **image_settings(processor))
        return {name: made[name].numpy() for name in self.image_inputs}

    image_inputs: tuple[str, ...] = ("pixel_values",)  # the arguments of `get_image_features`

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        core, ids = self.core(model), batch.host_ids.copy()
        if not takes_encoded_images(type(core)):
            raise ValueError(
                f"{type(core).__name__} of transformers {transformers.__version__} would leave out the images, which "
                "are encoded before its forward(): install transformers 5.18 or newer"
            )
        kinds = np.zeros_like(ids)  # [B, S]; on the host, which would wait for the device at every check
        for number, placeholder in enumerate(self.placeholder_ids(model.config), start=1):
            is_placeholder = (ids == placeholder) & batch.in_media
            is_stray = (ids == placeholder) & ~is_placeholder  # the model would insert an image there
            is_seen = np.arange(ids.shape[1]) < np.array(batch.row_lengths)[:, None] - 1
            if (is_stray & is_seen).any():
                raise ValueError(
                    f"a row holds the placeholder {placeholder} outside of its recorded images and videos: it is "
                    "banned from sampling, so remove it from the responses of your data"
                )
            # The last token of a row is never looked at: it may be any but a placeholder outside of media.
            ids[is_stray] = 0
            kinds[is_placeholder] = number
        kinds[(kinds == 1) & batch.in_video] = 2  # if videos have the placeholder of images
        encoded = self.encode_all(core, batch, ranks)
        for number, modality in enumerate(MODALITIES, start=1):
            check_count(encoded.get(modality), int((kinds == number).sum()))
        types = torch.from_numpy(kinds)
        taken = self.as_taken(encoded, types)
        extra = self.decoder_inputs(core, batch, types)
        input_ids = on_device(ids, batch.input_ids.device)
        return core(input_ids=input_ids, mm_encoder_outputs=taken, **extra, use_cache=False).last_hidden_state

    def placeholder_ids(self, config: PreTrainedConfig) -> tuple[int, ...]:
        """The placeholder of images, and that of videos if the family has another one for them."""
        return (self.placeholder_id(config),)

    def encode_all(self, core: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None) -> Encoded:
        """Returns modality -> features at all placeholders of a batch, in exactly one call of the vision tower."""
        if not batch.media.inputs:
            return {"image": self.encode_nothing(core, batch.input_ids.device)}
        return {"image": placed(self.encode_shared(core, batch, ranks, batch.media.inputs, [batch.media]), batch.media)}

    def as_taken(self, encoded: Encoded, token_types: Tensor) -> Encoded:
        """The features in the form that the model's forward() takes; `token_types` as in `decoder_inputs`."""
        return encoded

    def encode_nothing(self, core: PreTrainedModel, device: torch.device) -> ModelOutput:
        """Returns features of a blank image, none of which is inserted.

        Modules are entered and inputs have gradients as in a batch with images: ZeRO-3 gathers parameters in the order
        of both passes, and the order must be equal on all ranks.
        """
        return changed(self.encode(core, self.blank_image(core.config, device)), _none_of)

    def encode_shared(
        self,
        core: PreTrainedModel,
        batch: TokenBatch,
        ranks: SequenceRanks | None,
        inputs: Mapping[str, Tensor],
        media: Sequence[MediaBatch],
    ) -> ModelOutput:
        """Returns the features of `inputs`, the concatenated tensors of all `media`.

        Ranks of sequence parallelism encode a share of the media each and gather the features.
        """
        if ranks is None:
            return self.encode(core, inputs)
        num_parts = [num for one in media for num in one.num_parts]
        spans, ids = [span for one in media for span in one.spans], self.placeholder_ids(core.config)
        num_tokens = [int(np.isin(batch.host_ids[row, start:end], ids).sum()) for row, start, end in spans]
        shares = ranks.dealt(num_parts)
        if own := shares[ranks.rank]:
            encoded = self.encode(core, _chosen(inputs, num_parts, own))
        else:
            encoded = self.encode_nothing(core, batch.input_ids.device)
        return changed(encoded, lambda features: _gathered(features, num_tokens, shares, ranks))

    def core(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model without its output embeddings."""
        return submodel(model, "model")

    def encode(self, core: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
        """Returns the features of unique images, before they are repeated."""
        return method(core, "get_image_features")(**self.forward_inputs(inputs), return_dict=True)

    def decoder_inputs(self, core: PreTrainedModel, batch: TokenBatch, token_types: Tensor) -> dict[str, Tensor]:
        """Returns positions and masks that replace the model's own; `token_types` [B, S], on the host, is 1 at
        placeholders of images and 2 at those of videos."""
        return {}

    @abstractmethod
    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        """The smallest image that the vision tower takes, by the names of `process`."""


def submodel(model: nn.Module, name: str) -> PreTrainedModel:
    """Returns a submodule that is a transformers model."""
    part = model.get_submodule(name)
    if not isinstance(part, PreTrainedModel):
        raise TypeError(f"{name} of {type(model).__name__} is a {type(part).__name__} and no model of transformers")
    return part


def method(model: nn.Module, name: str) -> Callable[..., Any]:
    """A method of the model's own class; the types of nn.Module hold parameters and submodules alone."""
    own = getattr(model, name)
    if not callable(own):
        raise TypeError(f"{name} of {type(model).__name__} is no method")
    return own


def image_settings(processor: ProcessorMixin) -> dict[str, Any]:
    """The settings that a processor calls its image processor with, where these differ from the checkpoint's: several
    released checkpoints leave it to their processor to cut images into tiles."""
    defaults: Mapping[str, Mapping[str, Any]] = vars(processor.valid_processor_kwargs)["_defaults"]
    return dict(defaults.get("images_kwargs", {}))


Features = Tensor | Sequence[Tensor]  # of all media in one tensor, or one tensor each


def changed(encoded: ModelOutput, change: Callable[[Features], Features]) -> ModelOutput:
    """Returns a tower's output with changed features, of its last layer and of the layers that the decoder reads."""
    output = copy(encoded)
    output["pooler_output"] = change(encoded["pooler_output"])
    if "deepstack_features" in encoded:
        output["deepstack_features"] = [change(layer) for layer in encoded["deepstack_features"]]
    return output


def placed(encoded: ModelOutput, media: MediaBatch) -> ModelOutput:
    """Repeats features of unique media for all their positions, in batch order."""
    return changed(encoded, lambda features: _in_order(features, media))


def interleaved(encoded: Mapping[str, ModelOutput], token_types: Tensor) -> Tensor:
    """[N, H]: features of images and videos in the order of their places, for a model with one token for both."""
    kinds = token_types[token_types > 0]  # [N], row by row, on the host
    found = {MODALITIES.index(modality) + 1: _flat(output["pooler_output"]) for modality, output in encoded.items()}
    [some, *_] = found.values()
    features = some.new_zeros(len(kinds), some.shape[-1])
    for number, own in found.items():
        places = on_device((kinds == number).nonzero()[:, 0].numpy(), features.device)
        features = features.index_copy(0, places, own)
    return features


def _flat(features: Features) -> Tensor:
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _chosen(inputs: Mapping[str, Tensor], num_parts: list[int], chosen: list[int]) -> dict[str, Tensor]:
    """The tensors of some of the media: each has its parts of axis 0, or one row where there is one a medium."""
    split = {name: tensor.split(num_parts if len(tensor) == sum(num_parts) else 1) for name, tensor in inputs.items()}
    return {name: torch.cat([parts[i] for i in chosen]) for name, parts in split.items()}


def _gathered(own: Features, num_tokens: list[int], shares: list[list[int]], ranks: SequenceRanks) -> Features:
    """Gathers the features of each rank's share to the features of all media, in order and in the same form."""
    flat = ranks.features(_flat(own), [sum(num_tokens[i] for i in share) for share in shares])
    order = [i for share in shares for i in share]
    found = dict(zip(order, flat.split([num_tokens[i] for i in order]), strict=True))
    features = [found[i] for i in range(len(order))]
    return torch.cat(features).view(-1, *own.shape[1:]) if isinstance(own, Tensor) else features


def _none_of(features: Features) -> Features:
    return features[:0] if isinstance(features, Tensor) else [part[:0] for part in features]


def _in_order(features: Features, media: MediaBatch) -> Features:
    """Models give one tensor an image, or all parts (tiles) of all images in one."""
    if not isinstance(features, Tensor):
        return [features[i] for i in media.order]
    parts = features.split(list(media.num_parts))
    return torch.cat([parts[i] for i in media.order])


def check_count(encoded: ModelOutput | None, num_placeholders: int) -> None:
    """Raises: ValueError: the numbers of placeholders and embeddings differ."""
    features = () if encoded is None else encoded["pooler_output"]
    rows = [features] if isinstance(features, Tensor) else features
    num_embeddings = sum(tensor.numel() // tensor.shape[-1] for tensor in rows)
    if num_embeddings != num_placeholders:
        raise ValueError(
            f"the recorded media spans hold {num_placeholders} placeholders but the vision tower made "
            f"{num_embeddings} embeddings: prompts were processed with another model's processor"
        )


def refuse_long(clip: Clip, num_tokens: int, limits: VideoConfig) -> None:
    """Raises: ValueError: a video has too many tokens; for families with a fixed number of tokens per frame."""
    if num_tokens > limits.max_tokens:
        raise ValueError(
            f"its {len(clip.timestamps)} frames take {num_tokens} tokens, however small they are, and "
            f"data.video.max_tokens is {limits.max_tokens}: lower data.video.max_frames or raise it"
        )


MEDIA_TOKENS = r"<\|(image_pad|video_pad|vision_start|vision_end|vision_pad)\|>"


class PatchProcessor(Protocol):
    """An image or video processor of transformers that cuts images into patches."""

    patch_size: int
    merge_size: int  # patches of a token, along each side
    temporal_patch_size: int
    size: Any  # bounds of the pixels, by `shortest_edge` and `longest_edge`


class GridFamily(VisionFamily):
    """Images as rows of patches with a grid (t, h, w), scaled to a budget of pixels; three positions a token."""

    has_pixel_budget = True
    image_inputs = ("pixel_values", "image_grid_thw")  # float32 [num_patches, patch_dim], int64 [1, 3]

    def processor_options(self, model: str, data: DataConfig) -> dict[str, Any]:
        return {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        width, height = size
        images = processor.image_processor
        num_patches = images.get_number_of_image_patches(height, width)
        return np.full(num_patches // images.merge_size**2, processor.image_token_ids[0], dtype=np.int32)

    def shown_size(self, processor: ProcessorMixin, size: Size) -> Size:
        width, height = size
        rows, columns = self.scaled_size(processor.image_processor, height, width)
        return columns, rows

    def scaled_size(self, images: PatchProcessor, height: int, width: int) -> tuple[int, int]:
        """(height, width) that the image processor scales images to."""
        factor = images.patch_size * images.merge_size
        return scaled_image(height, width, factor, images.size["shortest_edge"], images.size["longest_edge"])

    def generate_inputs(self, model: PreTrainedModel, token_types: Tensor) -> dict[str, Tensor]:
        return {"mm_token_type_ids": token_types}

    def decoder_inputs(self, core: PreTrainedModel, batch: TokenBatch, token_types: Tensor) -> dict[str, Tensor]:
        """M-RoPE positions [3, B, S] by the model's own rule.

        Positions depend on where images stand and how large they are, not on the tokens: one row a layout is enough.
        Without an attention mask the rule counts on through the padding, which nothing looks at.
        """
        layout = batch.layout
        types = token_types[layout.rows]  # [L, S]
        grids = batch.media.inputs["image_grid_thw"][layout.images] if batch.media.inputs else None
        videos = batch.videos.inputs["video_grid_thw"][layout.videos] if batch.videos.inputs else None
        rope_index = method(core, "get_rope_index")
        positions, _ = rope_index(types, mm_token_type_ids=types, image_grid_thw=grids, video_grid_thw=videos)
        return {"position_ids": on_device(positions[:, layout.row_layouts].numpy(), batch.input_ids.device)}

    def encode(self, core: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
        """With what the tower would work out of the grids on the device, and the host would wait for."""
        made = self.forward_inputs(inputs)
        worked_out = tower_inputs(submodel(core, "visual"), made["image_grid_thw"], made["pixel_values"].device)
        return method(core, "get_image_features")(**made, **worked_out, return_dict=True)

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        vision = config.vision_config
        side = vision.spatial_merge_size
        channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(side * side, channels, device=device),
            "image_grid_thw": torch.tensor([[1, side, side]]),
        }


class QwenVideos(GridFamily, VideoFamily):
    """Videos as images whose grids have a time axis: the vision tower encodes both in one call."""

    video_options: Mapping[str, bool] = {"cap_pixels_per_frame": False}  # settings of the video processor

    def placeholder_ids(self, config: PreTrainedConfig) -> tuple[int, ...]:
        return self.placeholder_id(config), self.video_placeholder_id(config)

    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        videos = processor.video_processor
        height, width = self.frame_size(videos, clip, limits)
        grid = [num_grids(videos, clip), height // videos.patch_size, width // videos.patch_size]
        made = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [_metadata(clip)]}
        text = processor.replace_video_token(made, 0)
        return np.array(processor.tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    def process_video(self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig) -> Arrays:
        videos = processor.video_processor
        made = videos(
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=[_metadata(clip)],
            do_sample_frames=False,
            size=self.video_size(videos, clip, limits),
            return_tensors="pt",
            **self.video_options,
        )
        inputs = {name: made[name].numpy() for name in ("pixel_values_videos", "video_grid_thw")}
        if "second_per_grid_ts" in processor.model_input_names:
            seconds = videos.temporal_patch_size * clip.duration_s / len(clip.timestamps)
            inputs["second_per_grid_ts"] = np.array([seconds], dtype=np.float32)
        return inputs

    @abstractmethod
    def frame_size(self, videos: PatchProcessor, clip: Clip, limits: VideoConfig) -> tuple[int, int]:
        """(height, width) that the video processor scales frames to."""

    @abstractmethod
    def video_size(self, videos: PatchProcessor, clip: Clip, limits: VideoConfig) -> dict[str, int]:
        """The bounds of pixels as the video processor takes them."""

    def encode_all(self, core: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None) -> Encoded:
        if not batch.videos.inputs:
            return super().encode_all(core, batch, ranks)
        pixels, grids = batch.videos.inputs["pixel_values_videos"], batch.videos.inputs["video_grid_thw"]
        found = {"video": batch.videos}
        if batch.media.inputs:
            found = {"image": batch.media, "video": batch.videos}
            pixels = torch.cat([batch.media.inputs["pixel_values"], pixels])
            grids = torch.cat([batch.media.inputs["image_grid_thw"], grids])
        inputs = {"pixel_values": pixels, "image_grid_thw": grids}
        together = self.encode_shared(core, batch, ranks, inputs, list(found.values()))
        encoded, start = {}, 0
        for modality, media in found.items():
            own = slice(start, start + len(media.num_parts))
            encoded[modality] = placed(changed(together, itemgetter(own)), media)
            start = own.stop
        return encoded


class LongVideos(QwenVideos):
    """The video processor bounds the pixels of all frames together."""

    smart_resize: Callable[..., tuple[int, int]]
    """That of the video processor's module: frames, height, width, temporal and spatial factor, both bounds."""

    def frame_size(self, videos: PatchProcessor, clip: Clip, limits: VideoConfig) -> tuple[int, int]:
        size, num = self.video_size(videos, clip, limits), len(clip.timestamps)
        factor, temporal = videos.patch_size * videos.merge_size, videos.temporal_patch_size
        bounds = size["shortest_edge"], size["longest_edge"]
        return self.smart_resize(num, clip.height, clip.width, temporal, factor, *bounds)

    def video_size(self, videos: PatchProcessor, clip: Clip, limits: VideoConfig) -> dict[str, int]:
        least, most = frame_pixels(videos, clip, limits)
        num, factor = len(clip.timestamps), videos.temporal_patch_size
        num = min(num, round(num / factor) * factor)  # of which the processor counts the pixels
        return {"shortest_edge": least * num, "longest_edge": most * num}


class QwenVL(QwenVideos):
    """Source: arXiv:2409.12191, arXiv:2502.13923."""

    def frame_size(self, videos: PatchProcessor, clip: Clip, limits: VideoConfig) -> tuple[int, int]:
        size = self.video_size(videos, clip, limits)
        factor = videos.patch_size * videos.merge_size
        return smart_resize(clip.height, clip.width, factor, size["shortest_edge"], size["longest_edge"])

    def video_size(self, videos: PatchProcessor, clip: Clip, limits: VideoConfig) -> dict[str, int]:
        least, most = frame_pixels(videos, clip, limits)
        return {"shortest_edge": least, "longest_edge": most}

    def decoder_inputs(self, core: PreTrainedModel, batch: TokenBatch, token_types: Tensor) -> dict[str, Tensor]:
        """As released: what follows a video begins behind its largest position, which for a long one is its last time.

        transformers 5 goes on behind the larger side of a frame, engines do not; with images the two are one.
        """
        if not batch.videos.inputs:
            return super().decoder_inputs(core, batch, token_types)
        vision = core.config.vision_config
        a_second = getattr(vision, "tokens_per_second", 1.0)  # Qwen2-VL counts grids, not seconds
        return {"position_ids": released_positions(batch, token_types, vision.spatial_merge_size, a_second)}

    model_types: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl")
    media_tokens = MEDIA_TOKENS
    parts = {"vision": ("visual.",), "connector": ("visual.merger.",), "language": ("model.", "lm_head.")}


def frame_pixels(videos: PatchProcessor, clip: Clip, limits: VideoConfig) -> tuple[int, int]:
    """The fewest and the most pixels of a frame, so that a video takes `limits.max_tokens` at most."""
    token = (videos.patch_size * videos.merge_size) ** 2
    most = max(token, min(limits.max_frame_pixels, limits.max_tokens * token // num_grids(videos, clip)))
    return min(max(token, limits.min_frame_pixels), most), most


def released_positions(batch: TokenBatch, token_types: Tensor, merge_size: int, a_second: float) -> Tensor:
    """int64 [3, B, S]: time, row and column of each token; what follows a medium begins behind its largest position.

    `token_types` [B, S] is 1 at placeholders of images and 2 at those of videos, `a_second` the positions of time
    that a second of video has.
    """
    layout, images, videos = batch.layout, batch.media.inputs, batch.videos.inputs
    seconds = videos.get("second_per_grid_ts")
    steps = [1.0] * len(layout.videos) if seconds is None else seconds[layout.videos].tolist()
    grids = _rows(videos.get("video_grid_thw"), layout.videos)
    media = {
        1: iter([(grid, 1.0) for grid in _rows(images.get("image_grid_thw"), layout.images)]),
        2: iter([(grid, step * a_second) for grid, step in zip(grids, steps, strict=True)]),
    }
    rows = [_positions(row, media, merge_size) for row in token_types[layout.rows].tolist()]
    positions = np.stack(rows, axis=1)  # [3, L, S]
    return on_device(positions[:, layout.row_layouts.numpy()], batch.input_ids.device)


def tower_inputs(tower: PreTrainedModel, grids: Tensor, device: torch.device) -> dict[str, Any]:
    """What a vision tower works out of the grids [K, 3], which are on the host, by the names of its forward()."""
    vision = tower.config
    merge = vision.spatial_merge_size
    cu_seqlens = get_vision_cu_seqlens(grids)
    found: dict[str, Any] = {
        "position_ids": get_vision_position_ids(grids, merge),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": int(cu_seqlens.diff().max()),
    }
    if getattr(vision, "window_size", None):
        index, bounds = get_vision_window_index(grids, merge, vision.window_size, vision.patch_size)
        found |= {"window_index": index, "cu_window_seqlens": bounds, "max_window_seqlen": int(bounds.diff().max())}
    own = vars(tower)
    if "num_grid_per_side" in own:
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=own["num_grid_per_side"],
            mode=own["interpolation_mode"],
            align_corners=own["interpolation_align_corners"],
            spatial_merge_size=merge,
        )
        found |= {"interp_indices": indices, "interp_weights": weights}
    return {
        name: on_device(value.numpy(), device) if isinstance(value, Tensor) else value for name, value in found.items()
    }


def num_grids(videos: PatchProcessor, clip: Clip) -> int:
    """Steps of time of a clip's grid."""
    return ceil(len(clip.timestamps) / videos.temporal_patch_size)


def _metadata(clip: Clip) -> VideoMetadata:
    """A clip as video processors take it: one unit a second, so that frames stand at their times."""
    return VideoMetadata(
        total_num_frames=clip.duration_s,  # type: ignore[arg-type]  # declared as an integer, only divided by fps
        fps=1.0,
        frames_indices=list(clip.timestamps),  # type: ignore[arg-type]  # the same
    )


def _rows(grids: Tensor | None, places: Tensor) -> list[list[int]]:
    return [] if grids is None else grids[places].tolist()


def _positions(
    types: Sequence[int], media: Mapping[int, Iterator[tuple[list[int], float]]], merge_size: int
) -> np.ndarray:
    """int64 [3, S]: time, row and column of each token; `media` gives the grids of images (1) and videos (2) with the
    positions from one time to the next."""
    parts, start = [], 0
    for kind, run in groupby(types):
        num = len(list(run))
        if kind == 0:
            places = np.broadcast_to(np.arange(num), (3, num))
        else:
            (times, height, width), step = next(media[kind])
            places = np.indices((times, height // merge_size, width // merge_size)).reshape(3, -1)
            places[0] = (places[0] * step).astype(np.int64)
        parts.append(places + start)
        start = int(parts[-1].max()) + 1
    return np.concatenate(parts, axis=1)


MAX_LAYERS = 256  # of a decoder with routers
VISUAL_PARTS = {
    "vision": ("model.visual.",),
    "connector": ("model.visual.merger.",),
    "language": ("model.language_model.", "lm_head."),
}


class Qwen3VL(LongVideos):
    """Source: arXiv:2511.21631. Videos have the time of each pair of frames as text in front of its embeddings."""

    model_types = ("qwen3_vl",)
    media_tokens = MEDIA_TOKENS
    parts = {**VISUAL_PARTS, "connector": ("model.visual.merger.", "model.visual.deepstack_merger_list.")}
    smart_resize = staticmethod(qwen3_vl_smart_resize)


class Qwen3VLMoe(Qwen3VL):
    """Source: arXiv:2511.21631.

    Engine and learner choose experts each for themselves: where two experts are nearly equal, rounding may choose
    another one. `policy.freeze=[router]` keeps the weights that choose as they are; a run compares engine and learner
    before its first step.
    """

    model_types = ("qwen3_vl_moe",)
    parts = {
        **Qwen3VL.parts,
        "router": tuple(f"model.language_model.layers.{layer}.mlp.gate." for layer in range(MAX_LAYERS)),
    }
    transposed = r"\.mlp\.experts\.(gate_up_proj|down_proj)$"
    needs_gate = True


class Qwen35(Qwen3VL):
    """A delta rule runs through a whole row of the batch, so rows behind one another would see each other."""

    model_types = ("qwen3_5",)
    parts = VISUAL_PARTS
    engine_dtypes_on_cpu = ("bfloat16",)
    keeps_packed_rows_apart = shares_prefixes = False
    padded_because = "its layers carry a state from token to token"
    needs_gate = True
    on_cpu = "`resources.dtype=bfloat16` alone with vLLM, whose kernels take no float32; wider tolerance"
