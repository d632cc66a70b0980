"""Shared by the writers of tiny checkpoints: the size of the decoder, seeded weights, and the files of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from mobula.learner.policies.tiny.tokenizer import INITIALIZER_RANGE, MAX_POSITIONS

HIDDEN_SIZE = 128


def decoder_config(tokenizer: PreTrainedTokenizerBase, **own: Any) -> dict[str, Any]:
    """Two layers of 128; head_dim is 32, which engines on CPU take."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | own


def vision_config(**own: Any) -> dict[str, Any]:
    """Two layers of 64 and two heads."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": INITIALIZER_RANGE,
    } | own


def write_checkpoint(
    folder: Path,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    *,
    seed: int,
    renamed: Mapping[str, str] | None = None,
    drawn: str = "",
) -> Path:
    """Write float32 weights of this seed, tokenizer and processor into `folder`, and return `folder`.

    `renamed` has beginnings of parameter names as a new model saves them, and what they are in released checkpoints;
    `drawn` is the end of the name of a parameter that a new model has as zeros, so that nothing behind it is seen.
    """
    tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        model.to(device="cpu", dtype=torch.float32)  # type: ignore[call-arg]  # its decorator hides self
        if drawn:
            [zeros] = [parameter for name, parameter in model.named_parameters() if name.endswith(drawn)]
            zeros.data.normal_(std=INITIALIZER_RANGE)
    # Only stop and pad ids: an engine that takes its sampling defaults from this file samples from the plain policy.
    model.generation_config = GenerationConfig(
        eos_token_id=list(dict.fromkeys([tokenizer.eos_token_id, tokenizer.pad_token_id])),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if renamed:
        _rename(folder / "model.safetensors", renamed)
    return folder


def _rename(file: Path, renamed: Mapping[str, str]) -> None:
    state = {}
    for name, tensor in load_file(file).items():
        start = next((start for start in renamed if name.startswith(start)), "")
        state[renamed.get(start, "") + name.removeprefix(start)] = tensor.clone()
    save_file(state, file, metadata={"format": "pt"})
