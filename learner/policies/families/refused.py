"""Families that cannot be trained here, each with the reason."""

from __future__ import annotations

REFUSED = {
    "qwen3_vl_moe": "its experts lie transposed in engines, and a weight push does not transpose them",
    "qwen3_5": "engines compute it on CPU in bfloat16 alone, 0.02 away from the learner, and no GPU was tried",
    "qwen2_audio": "audio is not supported",
    "qwen2_5_omni": "audio is not supported",
    "kimi_vl": "transformers does not load it without remote code",
    "gemma3n": "its decoder takes embeddings of every layer, which a learner does not compute here",
    "gemma2": "its logits are capped behind the output embeddings, which is not computed here",
}
"""`model_type` -> why."""
