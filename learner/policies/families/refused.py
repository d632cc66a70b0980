"""Families that cannot be trained here, each with the reason."""

from __future__ import annotations

REFUSED = {
    "qwen3_5": "engines compute it on CPU in bfloat16 alone: 0.01 to 0.02 nat away from the learner in the "
    "mean and 0.06 at most, where 1e-5 is asked; no GPU was tried",
    "kimi_vl": "transformers does not load it without remote code",
    "gemma3n": "its decoder takes embeddings of every layer, which a learner does not compute here",
    "gemma2": "its logits are capped behind the output embeddings, which is not computed here",
}
"""`model_type` -> why."""
