"""A Qwen3.5 of random weights: three layers of gated delta rules, one of attention with a gate, interleaved M-RoPE."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from mobula.learner.policies.tiny.qwen3_vl import build_processor, vision_of
from mobula.learner.policies.tiny.tokenizer import build_tokenizer, media_token_ids
from mobula.learner.policies.tiny.writing import decoder_config, write_checkpoint

ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
DELTA_HEAD = 128  # of the kernels on CPU, which refuse 32


def write_tiny_qwen3_5(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 1.5 M parameters into `folder`; an image takes one token for each 32x32 pixels."""
    tokenizer = build_tokenizer()
    text = decoder_config(
        tokenizer,
        num_hidden_layers=4,  # of which the last one has attention
        head_dim=64,
        rope_parameters=ROPE,
        linear_key_head_dim=DELTA_HEAD,
        linear_value_head_dim=DELTA_HEAD,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        tie_word_embeddings=tie_word_embeddings,
    )
    vision = vision_of()
    del vision["deepstack_visual_indexes"]
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
        **media_token_ids(tokenizer),
    )
    return write_checkpoint(folder, Qwen3_5ForConditionalGeneration, config, build_processor(tokenizer), seed=seed)
