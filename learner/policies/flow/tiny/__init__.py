"""Tiny flow models of random weights in the layout that diffusers saves."""

from __future__ import annotations

import re
from pathlib import Path

import torch

TINY_FLOW = (
    "sd3", "sd3_glyphs", "sd3-img2img", "flux", "flux-kontext", "flux-kontext-letters", "flux2", "qwen-image",
    "qwen-image-edit", "z-image", "sana", "wan", "wan2.2", "wan-i2v", "cosmos2", "cosmos2.5",
)  # fmt: skip
"""Names of `mobula init-model` without `tiny-`. The function of a model in `models`, which imports diffusers, has its
name with `_` in place of `-` and `.`."""


def write_tiny_flow(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes the tiny model `name` of `TINY_FLOW` into `folder`, and returns `folder`."""
    assert name in TINY_FLOW, f"there is no tiny flow model {name}"
    try:
        from mobula.learner.policies.flow.tiny import models
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise
        raise ValueError(
            f"tiny-{name} is written by diffusers, which is not installed: pip install mobula[visual]"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = getattr(models, re.sub("[-.]", "_", name))(seed)
    pipeline.save_pretrained(folder)
    return folder
