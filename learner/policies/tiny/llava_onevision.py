"""A LLaVA-OneVision of random weights: a SigLIP tower, tiles by pinpoints, a Qwen2 decoder."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
)

from mobula.learner.policies.tiny.tokenizer import build_tokenizer, chat_template, token_id
from mobula.learner.policies.tiny.writing import decoder_config, vision_config, write_checkpoint

TILE = 56
TOKENS_PER_TILE = 16
PINPOINTS = [[TILE * i, TILE * j] for i in (1, 2) for j in (1, 2)]


def write_tiny_llava_onevision(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.5 M parameters into `folder`; an image takes at least two tiles of 16 tokens."""
    tokenizer = build_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"))
    size = {"size": {"height": TILE, "width": TILE}}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=PINPOINTS, **size),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(**size),
        num_image_tokens=TOKENS_PER_TILE,
        vision_feature_select_strategy="full",
        chat_template=chat_template(image="<image>\\n", video="<video>\\n"),
    )
    config = LlavaOnevisionConfig(
        vision_config=vision_config(
            model_type="siglip_vision_model", image_size=TILE, patch_size=14, vision_use_head=False
        ),
        text_config=decoder_config(tokenizer, model_type="qwen2", tie_word_embeddings=tie_word_embeddings),
        image_token_index=token_id(tokenizer, "<image>"),
        video_token_index=token_id(tokenizer, "<video>"),
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(
        folder,
        LlavaOnevisionForConditionalGeneration,
        config,
        processor,
        seed=seed,
        renamed={"vision_tower.": "vision_tower.vision_model."},
    )
