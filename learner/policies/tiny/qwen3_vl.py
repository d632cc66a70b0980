"""A Qwen3-VL of random weights: DeepStack features of two vision layers, interleaved M-RoPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from mobula.learner.policies.tiny.tokenizer import INITIALIZER_RANGE, VISION_TEMPLATE, build_tokenizer, media_token_ids
from mobula.learner.policies.tiny.writing import HIDDEN_SIZE, decoder_config, write_checkpoint

PIXELS_PER_TOKEN = 32 * 32
MAX_IMAGE_TOKENS = 64
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}


def write_tiny_qwen3_vl(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.7 M parameters into `folder`; an image takes one token for each 32x32 pixels."""
    tokenizer = build_tokenizer()
    config = Qwen3VLConfig(
        text_config=decoder_config(
            tokenizer, head_dim=32, rope_parameters=ROPE, tie_word_embeddings=tie_word_embeddings
        ),
        vision_config=vision_of(),
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **media_token_ids(tokenizer),
    )
    return write_checkpoint(folder, Qwen3VLForConditionalGeneration, config, build_processor(tokenizer), seed=seed)


def vision_of(**own: Any) -> dict[str, Any]:
    """Three vision layers, of which the first two give DeepStack features."""
    return {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 16,
        "initializer_range": INITIALIZER_RANGE,
        "deepstack_visual_indexes": [0, 1],
    } | own


def build_processor(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLProcessor:
    """Patches of 16x16, four of them a token."""
    size = {"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN}
    patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3, **patches),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size=size, min_frames=2, max_frames=8, cap_pixels_per_frame=False, **patches
        ),
        chat_template=VISION_TEMPLATE,
    )
