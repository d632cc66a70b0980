"""GLM-4.1V: one placeholder an embedding, M-RoPE positions from the grids of pictures."""

from __future__ import annotations

from learner.policies.families.qwen_vl import GridFamily


class Glm4v(GridFamily):
    """Source: arXiv:2507.01006."""

    model_types = ("glm4v",)
    media_tokens = r"<\|(image|video|begin_of_image|end_of_image|begin_of_video|end_of_video)\|>"
    parts = {
        "vision": ("model.visual.",),
        "connector": ("model.visual.merger.",),
        "language": ("model.language_model.", "lm_head."),
    }
