"""Tiny models of random weights in the layout of released checkpoints, as rows of one table.

They run offline wherever released checkpoints run: tests, examples and CPU benchmarks train them.
"""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen2_5_VLModel

from mobula.learner.policies.families.vision import takes_encoded_images
from mobula.learner.policies.tiny.models import SMALL_TEXT, TEXT_MODELS, TINY
from mobula.learner.policies.tiny.writing import MAX_POSITIONS, SPECIAL_TOKENS, WORDS

__all__ = [
    "MAX_POSITIONS",
    "SMALL_TEXT",
    "SPECIAL_TOKENS",
    "TEXT_MODELS",
    "TINY",
    "WORDS",
    "write_checked",
    "write_tiny",
    "write_tiny_qwen2_5_vl",
]

write_tiny_qwen2_5_vl = TINY["qwen2.5-vl"]


def write_checked(folder: Path) -> Path:
    """Write the model of a machine check: with images, or of text where transformers cannot train with images."""
    return write_tiny("qwen2.5-vl" if takes_encoded_images(Qwen2_5_VLModel) else "qwen2.5", folder)


def write_tiny(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write the tiny model `name` of `TINY`."""
    if name not in TINY:
        raise ValueError(f"there is no tiny model {name!r}: choose {', '.join(TINY)}")
    return TINY[name](folder, seed=seed, tie_word_embeddings=tie_word_embeddings)
