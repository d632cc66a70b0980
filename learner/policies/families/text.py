"""Models whose prompts are text alone: token embeddings go into the decoder and nothing else."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families.base import Family


class TextFamily(Family):
    """Models whose logits are the output embeddings times the decoder's last state."""

    model_types = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
    # Tokenizers of text models may have the tokens of their vision-language siblings.
    media_tokens = r"<\|(image_pad|video_pad|vision_start|vision_end|vision_pad)\|>"
    parts = {}
    takes_images = False

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        if batch.media.inputs:
            raise ValueError(
                f"policy.model is of type {model.config.model_type}, which takes no images here, "
                "but a prompt has some: use a vision-language model, or remove images from the data"
            )
        embeds = model.get_input_embeddings()(batch.input_ids)
        return model.get_decoder()(inputs_embeds=embeds, use_cache=False).last_hidden_state


class Janus(Family):
    """Its answers are image tokens; `mobula.learner.policies.image_tokens` computes them."""

    model_types = ("janus",)
    media_tokens = ""
    parts = {
        "vision": ("model.vision_model.", "model.aligner."),
        "vq": ("model.vqmodel.",),
        "language": ("model.language_model.", "lm_head."),
    }
    takes_images = False
    without_images = "policy.model=janus is trained on texts here"
    makes_images = True

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        raise ValueError("a policy of type janus answers with image tokens here: set sampler=image_tokens")
