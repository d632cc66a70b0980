"""A Janus of random weights that draws images of 16 x 16 in 16 tokens of 64 codes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    Qwen2Tokenizer,
)

from mobula.learner.policies.tiny.tokenizer import (
    INITIALIZER_RANGE,
    SPECIAL_TOKENS,
    build_tokenizer,
    chat_template,
    token_id,
)
from mobula.learner.policies.tiny.writing import decoder_config

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
        model = JanusForConditionalGeneration(_config(tokenizer, ids))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=INITIALIZER_RANGE)
    model.generation_config = GenerationConfig(
        bos_token_id=ids["bos"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        generation_kwargs={"boi_token_id": ids["boi_token"]},
    )
    model.save_pretrained(folder)
    images = JanusImageProcessor(size={"height": SIDE, "width": SIDE}, min_size=SIDE)
    JanusProcessor(images, tokenizer, tokenizer.chat_template, num_image_tokens=NUM_TOKENS).save_pretrained(folder)
    return folder


def _config(tokenizer: Qwen2Tokenizer, ids: dict[str, int]) -> JanusConfig:
    text = decoder_config(
        tokenizer, hidden_size=HIDDEN_SIZE, intermediate_size=2 * HIDDEN_SIZE, bos_token_id=ids["bos"]
    )
    vision = JanusVisionConfig(
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
    codes = JanusVQVAEConfig(
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
    return JanusConfig(
        text_config=LlamaConfig(**text),
        vision_config=vision,
        vq_config=codes,
        image_token_id=ids["image_token"],
        tie_word_embeddings=False,
        dtype="float32",
    )
