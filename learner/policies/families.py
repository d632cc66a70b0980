"""Which model families a token policy computes, by `model_type` of a checkpoint's config.json."""

from __future__ import annotations

import transformers
from transformers import AutoConfig

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl")  # one embedding a placeholder, and nothing else enters the decoder
# The logits are the output embeddings times the decoder's last state, and nothing else is done to them.
TEXT_FAMILIES = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")


def takes_pictures(source: str, key: str = "policy.model") -> bool:
    """Whether the checkpoint at `source` (the value of `key`) is of a vision-language family; else it is text-only.

    Raises:
        ValueError: it is of a family that cannot be computed here.
    """
    try:
        kind = AutoConfig.from_pretrained(source).model_type
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{key}={source} has a config.json that transformers {transformers.__version__} cannot use "
            f"({str(error).splitlines()[0]}): {_known()}"
        ) from error
    if kind not in (*VISION_FAMILIES, *TEXT_FAMILIES):
        raise ValueError(f"{key}={source} is of the model type {kind}, which is not supported: {_known()}")
    return kind in VISION_FAMILIES


def max_positions(source: str) -> int | None:
    """The longest sequence that the checkpoint's positions are made for; None if the file leaves that to a factor."""
    text = AutoConfig.from_pretrained(source).get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return None if "factor" in str(rope) else text.max_position_embeddings


def _known() -> str:
    return (
        f"choose a vision-language checkpoint of type {', '.join(VISION_FAMILIES)}, or a text-only one of type "
        f"{', '.join(TEXT_FAMILIES)}"
    )
