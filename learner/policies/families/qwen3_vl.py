"""Qwen3-VL with a dense decoder: features of several vision layers enter several decoder layers (DeepStack)."""

from __future__ import annotations

from learner.policies.families.qwen_vl import MEDIA_TOKENS, GridFamily


class Qwen3VL(GridFamily):
    """Source: arXiv:2511.21631."""

    model_types = ("qwen3_vl",)
    media_tokens = MEDIA_TOKENS
    parts = {
        "vision": ("model.visual.",),
        "connector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        "language": ("model.language_model.", "lm_head."),
    }
