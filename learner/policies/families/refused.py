"""Families that cannot be trained here, each with the reason."""

from __future__ import annotations

REFUSED = {
    "qwen3_5_moe": "its experts lie transposed and choose for themselves as those of qwen3_vl_moe do, vLLM on CPU "
    "computes its other layers in bfloat16 alone, and engine and learner were never compared",
    "kimi_vl": "transformers does not load it without remote code",
    "gemma3n": "its decoder takes embeddings of every layer, which a learner does not compute here",
    "gemma2": "its logits are capped behind the output embeddings, which is not computed here",
}
"""`model_type` -> why."""
