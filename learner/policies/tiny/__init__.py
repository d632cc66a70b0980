"""Tiny models of random weights in the layout of released checkpoints, one file for each family.

They run offline wherever released checkpoints run: tests, examples and CPU benchmarks train them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

from transformers import Qwen2_5_VLModel

from mobula.learner.policies.families.vision import takes_encoded_images
from mobula.learner.policies.tiny.audio import write_tiny_qwen2_5_omni, write_tiny_qwen2_audio
from mobula.learner.policies.tiny.qwen import (
    write_tiny_qwen2_5_vl,
    write_tiny_qwen2_vl,
    write_tiny_qwen3_5,
    write_tiny_qwen3_vl,
    write_tiny_qwen3_vl_moe,
)
from mobula.learner.policies.tiny.vision import (
    DECODERS,
    write_tiny_gemma3,
    write_tiny_glm4v,
    write_tiny_idefics,
    write_tiny_internvl,
    write_tiny_llava,
    write_tiny_llava_onevision,
    write_tiny_text,
)
from mobula.learner.policies.tiny.vision import IDEFICS_ARCHITECTURES as IDEFICS
from mobula.learner.policies.tiny.vision import TEXT_ARCHITECTURES as TEXT
from mobula.learner.policies.tiny.writing import MAX_POSITIONS, SPECIAL_TOKENS, WORDS

__all__ = ["MAX_POSITIONS", "SPECIAL_TOKENS", "TINY", "WORDS", "write_checked", "write_tiny", "write_tiny_qwen2_5_vl"]


class Writer(Protocol):
    """Writes a checkpoint into a folder and returns the folder; the same seed gives the same weights."""

    def __call__(self, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path: ...


TINY: dict[str, Writer] = {
    "qwen2-vl": write_tiny_qwen2_vl,
    "qwen2.5-vl": write_tiny_qwen2_5_vl,
    "qwen3-vl": write_tiny_qwen3_vl,
    "qwen3.5": write_tiny_qwen3_5,
    "qwen3-vl-moe": write_tiny_qwen3_vl_moe,
    **{name: partial(write_tiny_internvl, name) for name in DECODERS},
    "llava-onevision": write_tiny_llava_onevision,
    **{name: partial(write_tiny_idefics, name) for name in IDEFICS},
    "glm4v": write_tiny_glm4v,
    "gemma3": write_tiny_gemma3,
    "llava": write_tiny_llava,
    "qwen2-audio": write_tiny_qwen2_audio,
    "qwen2.5-omni": write_tiny_qwen2_5_omni,
    **{name: partial(write_tiny_text, name) for name in TEXT},
}
"""`policy.tiny` -> what writes it."""


def write_checked(folder: Path) -> Path:
    """Write the model of a machine check: with images, or of text where transformers cannot train with images."""
    return write_tiny("qwen2.5-vl" if takes_encoded_images(Qwen2_5_VLModel) else "qwen2.5", folder)


def write_tiny(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write the tiny model `name` of `TINY`."""
    if name not in TINY:
        raise ValueError(f"there is no tiny model {name!r}: choose {', '.join(TINY)}")
    return TINY[name](folder, seed=seed, tie_word_embeddings=tie_word_embeddings)
