"""A decoder with random weights, small enough to train on a core."""

from __future__ import annotations

from transformers import Qwen2Config, Qwen2ForCausalLM


def text_model(width: int, num_blocks: int, vocabulary: int) -> Qwen2ForCausalLM:
    """Returns a Qwen2 model in float32 and in training mode, with grouped heads."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="float32",
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config).train()
