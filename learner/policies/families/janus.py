"""Janus and Janus-Pro, as models that answer with a picture."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from learner.policies.batch import TokenBatch
from learner.policies.families.base import Family


class Janus(Family):
    """Its answers are image tokens; `learner.policies.image_tokens` computes them."""

    model_types = ("janus",)
    media_tokens = ""
    parts = {
        "vision": ("model.vision_model.", "model.aligner."),
        "vq": ("model.vqmodel.",),
        "language": ("model.language_model.", "lm_head."),
    }
    takes_pictures = False
    without_pictures = "policy.model=janus is trained on texts here"
    makes_pictures = True

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch) -> Tensor:
        raise ValueError("a policy of type janus answers with image tokens here: set sampler=image_tokens")
