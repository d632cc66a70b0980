"""Qwen3-VL, dense and with experts: features of several vision layers enter several decoder layers (DeepStack)."""

from __future__ import annotations

from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.video_processing_utils import BaseVideoProcessor

from configs.schema.data import VideoConfig
from learner.policies.families.base import Clip
from learner.policies.families.qwen_vl import MEDIA_TOKENS, QwenVideos, frame_pixels

MAX_LAYERS = 256  # of a decoder with routers


class Qwen3VL(QwenVideos):
    """Source: arXiv:2511.21631. Videos have the time of each pair of frames as text in front of its embeddings."""

    model_types = ("qwen3_vl",)
    media_tokens = MEDIA_TOKENS
    parts = {
        "vision": ("model.visual.",),
        "connector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        "language": ("model.language_model.", "lm_head."),
    }

    def frame_size(self, videos: BaseVideoProcessor, clip: Clip, limits: VideoConfig) -> tuple[int, int]:
        size, num = self.video_size(videos, clip, limits), len(clip.timestamps)
        factor, temporal = videos.patch_size * videos.merge_size, videos.temporal_patch_size
        bounds = size["shortest_edge"], size["longest_edge"]
        return smart_resize(num, clip.height, clip.width, temporal, factor, *bounds)

    def video_size(self, videos: BaseVideoProcessor, clip: Clip, limits: VideoConfig) -> dict[str, int]:
        """Of all frames together."""
        least, most = frame_pixels(videos, clip, limits)
        return {"shortest_edge": least * len(clip.timestamps), "longest_edge": most * len(clip.timestamps)}


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
    note = (
        "engine and learner choose experts each for themselves, and where rounding makes them choose others their "
        "log-probs differ; choices are not replayed. The preset freezes the routers (`policy.freeze=[router]`), and a "
        "run compares engine and learner before its first step, in its own precision and with its own weights"
    )
