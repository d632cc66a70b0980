"""Tiny flow models of random weights in the layout that diffusers saves."""

from __future__ import annotations

from pathlib import Path

import torch

TINY_FLOW = {
    "sd3": "sd3",
    "sd3_glyphs": "sd3_glyphs",
    "sd3-img2img": "sd3_img2img",
    "flux": "flux",
    "flux-kontext": "flux_kontext",
    "flux-kontext-letters": "flux_kontext_letters",
    "flux2": "flux2",
    "qwen-image": "qwen_image",
    "qwen-image-edit": "qwen_image_edit",
    "z-image": "z_image",
    "sana": "sana",
    "wan": "wan",
    "wan2.2": "wan2_2",
    "wan-i2v": "wan_i2v",
    "cosmos2": "cosmos2",
    "cosmos2.5": "cosmos2_5",
}
"""Name of `mobula init-model` without `tiny-` -> function of `models`, which imports diffusers."""


def write_tiny_flow(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes the tiny model `name` of `TINY_FLOW` into `folder`, and returns `folder`."""
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
        pipeline = getattr(models, TINY_FLOW[name])(seed)
    pipeline.save_pretrained(folder)
    return folder
