"""Qwen3-VL, dense and with experts: features of several vision layers enter several decoder layers (DeepStack)."""

from __future__ import annotations

from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from mobula.learner.policies.families.qwen_vl import MEDIA_TOKENS, LongVideos

MAX_LAYERS = 256  # of a decoder with routers


class Qwen3VL(LongVideos):
    """Source: arXiv:2511.21631. Videos have the time of each pair of frames as text in front of its embeddings."""

    model_types = ("qwen3_vl",)
    media_tokens = MEDIA_TOKENS
    parts = {
        "vision": ("model.visual.",),
        "connector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        "language": ("model.language_model.", "lm_head."),
    }
    smart_resize = staticmethod(smart_resize)


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
