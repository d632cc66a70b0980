"""Gemma 3 checkpoints with a vision tower, of which the decoder is trained on text alone."""

from __future__ import annotations

from learner.policies.families.text import TextFamily


class Gemma3(TextFamily):
    """Source: arXiv:2503.19786.

    Pictures are refused. A picture's tokens see each other in both directions; vLLM's attention on CPU ignores that
    mask without an error (0.01 nat apart), and no GPU was there to compare on. The vision tower keeps its weights.
    """

    model_types = ("gemma3",)
    media_tokens = r"<start_of_image>|<end_of_image>|<image_soft_token>"
    parts = {"vision": ("vision_tower.",), "connector": ("multi_modal_projector.",), "language": ("language_model.",)}
    without_pictures = (
        "policy.model is a Gemma 3, whose pictures are refused: vLLM on CPU ignores their bidirectional attention, and "
        "the path on a GPU was never compared"
    )
