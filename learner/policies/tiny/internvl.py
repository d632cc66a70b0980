"""An InternVL (3 with a Qwen2 decoder, 3.5 with a Qwen3 one) of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
)

from mobula.learner.policies.tiny.tokenizer import build_tokenizer, chat_template, token_id
from mobula.learner.policies.tiny.writing import decoder_config, vision_config, write_checkpoint

TILE = 56
TOKENS_PER_TILE = 4
MAX_TILES = 4
DECODERS: dict[str, dict[str, Any]] = {
    "internvl3": {"model_type": "qwen2"},
    "internvl3.5": {"model_type": "qwen3", "head_dim": 32},
}


def write_tiny_internvl(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write the version `name` of 0.5 M parameters into `folder`; a tile of 56x56 pixels takes 4 tokens."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = build_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), named)
    size = {"size": {"height": TILE, "width": TILE}}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(crop_to_patches=True, min_patches=1, max_patches=MAX_TILES, **size),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(**size),
        image_seq_length=TOKENS_PER_TILE,
        chat_template=chat_template(image="<IMG_CONTEXT>\\n", video="<video>\\n"),
    )
    config = InternVLConfig(
        vision_config=vision_config(attention_bias=True, image_size=[TILE, TILE], patch_size=[14, 14]),
        text_config=decoder_config(tokenizer, tie_word_embeddings=tie_word_embeddings, **DECODERS[name]),
        image_token_id=token_id(tokenizer, "<IMG_CONTEXT>"),
        image_seq_length=TOKENS_PER_TILE,
        downsample_ratio=0.5,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(folder, InternVLForConditionalGeneration, config, processor, seed=seed)
