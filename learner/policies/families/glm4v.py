"""GLM-4.1V: one placeholder an embedding, M-RoPE positions from the grids of images and of single pairs of frames."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.glm4v.image_processing_glm4v import smart_resize as scaled_image
from transformers.models.glm4v.video_processing_glm4v import smart_resize
from transformers.utils import ModelOutput

from mobula.learner.policies.families.qwen_vl import LongVideos, PatchProcessor, tower_inputs
from mobula.learner.policies.families.vision import interleaved, method, submodel


class Glm4v(LongVideos):
    """Source: arXiv:2507.01006. A video has the whole second of each pair of frames as text behind its embeddings, and
    these in the places of the token of images."""

    model_types = ("glm4v",)
    media_tokens = r"<\|(image|video|begin_of_image|end_of_image|begin_of_video|end_of_video)\|>"
    parts = {
        "vision": ("model.visual.",),
        "connector": ("model.visual.merger.",),
        "language": ("model.language_model.", "lm_head."),
    }
    note = (
        "vLLM's own processing takes one video a prompt (`get_supported_mm_limits`), so the ids that it makes of "
        "several are not compared; engines here get processed videos, and several in a prompt are measured"
    )

    engine_max_videos = 1
    video_options = {}
    smart_resize = staticmethod(smart_resize)

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

    def as_taken(self, encoded: dict[str, ModelOutput], token_types: Tensor) -> dict[str, ModelOutput]:
        """As images: the model's forward() looks for the token of images, and would put videos over them."""
        if "video" not in encoded:
            return encoded
        taken = copy(encoded["video"])
        taken["pooler_output"] = [interleaved(encoded, token_types)]
        return {"image": taken}
