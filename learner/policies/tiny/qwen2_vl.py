"""A Qwen2-VL of random weights: full attention in the vision tower."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from mobula.learner.policies.tiny.qwen2_5_vl import MAX_IMAGE_TOKENS, MERGE_SIZE, PATCH_SIZE, PIXELS_PER_TOKEN
from mobula.learner.policies.tiny.tokenizer import INITIALIZER_RANGE, VISION_TEMPLATE, build_tokenizer, media_token_ids
from mobula.learner.policies.tiny.writing import HIDDEN_SIZE, decoder_config, write_checkpoint


def write_tiny_qwen2_vl(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.6 M parameters into `folder`; an image takes one token for each 28x28 pixels."""
    tokenizer = build_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2VLConfig(
        text_config=decoder_config(tokenizer, rope_parameters=rope, tie_word_embeddings=tie_word_embeddings),
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": HIDDEN_SIZE,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "initializer_range": INITIALIZER_RANGE,
        },
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **media_token_ids(tokenizer),
    )
    size = {"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN}
    patches = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(
            size=size, min_frames=2, max_frames=8, cap_pixels_per_frame=True, **patches
        ),
        chat_template=VISION_TEMPLATE,
    )
    return write_checkpoint(folder, Qwen2VLForConditionalGeneration, config, processor, seed=seed)
