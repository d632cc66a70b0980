"""Text-only models of random weights."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mobula.learner.policies.tiny.tokenizer import VISION_TEMPLATE, build_tokenizer
from mobula.learner.policies.tiny.writing import decoder_config, write_checkpoint

ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen2.5": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
}
# The shape of Qwen2.5-0.5B, with the vocabulary of the tiny tokenizer.
SMALL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def write_tiny_text(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write the architecture `name` into `folder`: 0.35 M parameters, tokenizer and chat template."""
    config, model, own = ARCHITECTURES[name]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = VISION_TEMPLATE
    settings = decoder_config(tokenizer, tie_word_embeddings=tie_word_embeddings, dtype="float32", **own)
    return write_checkpoint(folder, model, config(**settings), tokenizer, seed=seed)


def write_small_text(folder: Path, *, seed: int = 0) -> Path:
    """Write a model of random weights and 0.36 billion parameters into `folder`, for measurements."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = VISION_TEMPLATE
    settings = decoder_config(tokenizer, dtype="float32", tie_word_embeddings=True, **SMALL)
    return write_checkpoint(folder, Qwen2ForCausalLM, Qwen2Config(**settings), tokenizer, seed=seed)
