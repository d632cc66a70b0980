"""Models that sample images as tokens: guidance, policy and a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.base import Policy, PolicyOutput
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.head import Distribution, TokenLogprobs, token_logprobs
from mobula.learner.policies.sde import guided
from mobula.learner.policies.tiny.writing import (
    INITIALIZER_RANGE,
    SPECIAL_TOKENS,
    build_tokenizer,
    chat_template,
    decoder_config,
    token_id,
)

# Classifier-free guidance for image tokens: states of a prompt are extrapolated from those of an empty prompt.
#
# A model's logits of image tokens are vision_head(state). With classifier-free guidance they are u + g (c - u), of the
# prompt's and the empty prompt's; the head is affine, so they are vision_head(u + g (c - u)) of the states. Sampler and
# policy share these functions. Source: Janus-Pro, arXiv:2501.17811.

TRAINED = ("model.language_model.", "model.generation_")
"""Beginnings of the parameters that image tokens are predicted by."""


def num_image_tokens(config: hf.PretrainedConfig) -> int:
    """T: tokens of one image."""
    return int(config.vision_config.num_image_tokens)


def canary_tokens(source: str) -> Tensor:
    """int64 [T]: arbitrary image tokens of the checkpoint at `source`, the same on every call."""
    config = hf.AutoConfig.from_pretrained(source, trust_remote_code=False)
    return torch.arange(num_image_tokens(config)) * 7 % config.vq_config.num_embeddings


def without_text(model: hf.PreTrainedModel, ids: Tensor) -> Tensor:
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


class ImageTokenPolicy(Policy):
    """Scores the image tokens behind a prompt, with the guidance that they were sampled with."""

    model: hf.PreTrainedModel

    def __init__(self, model: hf.PreTrainedModel, config: LearnerConfig, guidance: float) -> None:
        super().__init__()
        self.model = model
        self._guidance = guidance
        self._chunk_tokens = config.logprob_chunk_tokens

    def forward(
        self, batch: TokenBatch, distribution: Distribution, *, entropy_has_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probs of the batch's targets; logits are kept for no chunk of them, but computed again."""
        states, targets = self._states(batch), batch.targets[batch.hidden_rows, batch.target_columns]

        def scored(states: Tensor, targets: Tensor) -> TokenLogprobs:
            logits = image_logits(self.model, states)
            return token_logprobs(logits, targets, distribution, entropy_has_gradient=entropy_has_gradient)

        parts = zip(states.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True)
        found = [checkpoint(scored, *part, use_reentrant=False) for part in parts]
        logprobs, entropy, is_argmax = (batch.padded(torch.cat(column)) for column in zip(*found, strict=True))
        return PolicyOutput(logprobs, entropy, is_argmax)

    def _states(self, batch: TokenBatch) -> Tensor:
        """float32 [N, P]: before each of the N targets."""
        ids, rows, columns = batch.input_ids, batch.hidden_rows, batch.hidden_columns
        last = torch.full_like(ids[:, 0], ids.shape[1]).scatter_reduce(0, rows, columns, "amin")  # of each prompt
        is_text = torch.arange(ids.shape[1], device=ids.device) <= last[:, None]
        if self._guidance != 1:
            ids = torch.cat([ids, torch.where(is_text, without_text(self.model, ids), ids)])
            rows, columns = torch.cat([rows, rows + len(is_text)]), columns.repeat(2)
            is_text = is_text.repeat(2, 1)
        embeds = embedded(self.model, ids, is_text)
        decoder = self.model.get_submodule("model.language_model")
        hidden = decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return head_states(self.model, hidden[rows, columns], self._guidance)


def freeze_the_rest(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Take out of training what image tokens are not predicted by."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED))
    return model


TINY_JANUS = "janus"  # `mobula init-model` without `tiny-`
SIDE, PATCH, NUM_CODES = 16, 4, 64
NUM_TOKENS = (SIDE // PATCH) ** 2
HIDDEN_SIZE = 64
NAMES = {
    "bos": "<|begin|>",
    "image_token": "<|image_pad|>",
    "boi_token": "<|image_start|>",
    "eoi_token": "<|image_end|>",
}


def write_tiny_janus(folder: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint of 0.5 M parameters into `folder`, and return `folder`."""
    named = {name: token for name, token in NAMES.items() if name != "bos"}
    tokenizer = build_tokenizer((*SPECIAL_TOKENS, NAMES["bos"]), named, bos=NAMES["bos"])
    tokenizer.chat_template = "{{- '<|begin|>' -}}" + chat_template(image="<|image_start|><|image_pad|><|image_end|>")
    ids = {name: token_id(tokenizer, token) for name, token in NAMES.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.JanusForConditionalGeneration(_config(tokenizer, ids))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=INITIALIZER_RANGE)
    model.generation_config = hf.GenerationConfig(
        bos_token_id=ids["bos"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        generation_kwargs={"boi_token_id": ids["boi_token"]},
    )
    model.save_pretrained(folder)
    images = hf.JanusImageProcessor(size={"height": SIDE, "width": SIDE}, min_size=SIDE)
    hf.JanusProcessor(images, tokenizer, tokenizer.chat_template, num_image_tokens=NUM_TOKENS).save_pretrained(folder)
    return folder


def _config(tokenizer: hf.Qwen2Tokenizer, ids: dict[str, int]) -> hf.JanusConfig:
    text = decoder_config(
        tokenizer, hidden_size=HIDDEN_SIZE, intermediate_size=2 * HIDDEN_SIZE, bos_token_id=ids["bos"]
    )
    vision = hf.JanusVisionConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=HIDDEN_SIZE,
        num_image_tokens=NUM_TOKENS,
        depth=2,
        mlp_ratio=2.0,
    )
    codes = hf.JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=NUM_CODES,
        latent_channels=16,
        base_channels=32,
        channel_multiplier=[1, 1, 1],
        num_res_blocks=1,
        num_patches=SIDE // PATCH,
        projection_dim=HIDDEN_SIZE,
        image_token_embed_dim=HIDDEN_SIZE,
    )
    return hf.JanusConfig(
        text_config=hf.LlamaConfig(**text),
        vision_config=vision,
        vq_config=codes,
        image_token_id=ids["image_token"],
        tie_word_embeddings=False,
        dtype="float32",
    )
