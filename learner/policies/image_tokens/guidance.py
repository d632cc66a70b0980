"""Classifier-free guidance for image tokens: states of a prompt are extrapolated from those of an empty prompt.

A model's logits of image tokens are vision_head(state). With classifier-free guidance they are u + g (c - u), of the
prompt's and the empty prompt's; the head is affine, so they are vision_head(u + g (c - u)) of the states. Sampler and
policy share these functions. Source: Janus-Pro, arXiv:2501.17811.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from mobula.learner.policies.sde import guided

TRAINED = ("model.language_model.", "model.generation_")
"""Beginnings of the parameters that image tokens are predicted by."""


def num_image_tokens(config: PretrainedConfig) -> int:
    """T: tokens of one image."""
    return int(config.vision_config.num_image_tokens)


def canary_tokens(source: str) -> Tensor:
    """int64 [T]: arbitrary image tokens of the checkpoint at `source`, the same on every call."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return torch.arange(num_image_tokens(config)) * 7 % config.vq_config.num_embeddings


def without_text(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Token ids of a prompt without its text: what is neither the first token nor the start of an image is padding."""
    own = model.generation_config
    is_kept = (ids == own.bos_token_id) | (ids == vars(own)["generation_kwargs"]["boi_token_id"])
    return torch.where(is_kept, ids, own.pad_token_id)


def embedded(model: Any, ids: Tensor, is_text: Tensor) -> Tensor:
    """float [B, S, H] of ids [B, S], which are text where `is_text` and image tokens elsewhere."""
    text = model.get_input_embeddings()(torch.where(is_text, ids, 0))
    image = model.prepare_embeddings_for_image_generation(torch.where(is_text, 0, ids))
    return torch.where(is_text[..., None], text, image)


def head_states(model: Any, hidden: Tensor, guidance: float) -> Tensor:
    """float32 [N, P]: what `vision_head` takes, of the decoder's last states.

    Those are [N, H] without guidance, and [2N, H] with it: of the prompt, then of the empty one.
    """
    head = model.model.generation_head
    states = head.activation_fn(head.proj_out(hidden))
    if guidance == 1:
        return states.float()
    conditional, unconditional = states.chunk(2)
    return guided(conditional, unconditional, guidance)


def image_logits(model: Any, states: Tensor) -> Tensor:
    """float32 [N, V]: of `head_states`."""
    head = model.model.generation_head.vision_head
    return head(states.to(head.weight.dtype)).float()
