"""Text-only checkpoints of random weights, written as released ones are laid out."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from mobula.learner.policies.tiny.writing import MAX_POSITIONS, VISION_TEMPLATE, build_tokenizer

OWN = {"qwen3": {"head_dim": 32}, "gemma": {"head_dim": 32}, "gemma3_text": {"head_dim": 32, "sliding_window": 16}}


def write_text_policy(folder: Path, family: str, *, with_template: bool = True) -> Path:
    """A model of two layers, of the `model_type` that is named."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = VISION_TEMPLATE if with_template else None
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS, initializer_range=0.08,
        dtype="float32", **ends, **(OWN[family] if family in OWN else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # so that norms and biases matter
        if parameter.dim() == 1:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.generation_config = GenerationConfig(**{key: value for key, value in ends.items() if value is not None})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
