"""Tiny flow models of random weights in the layout that diffusers saves."""

from __future__ import annotations

from pathlib import Path

TINY_FLOW = {
    "sd3": "write_tiny_sd3",
    "sd3_glyphs": "write_tiny_sd3_glyphs",
    "flux": "write_tiny_flux",
    "qwen-image": "write_tiny_qwen_image",
    "sana": "write_tiny_sana",
    "wan": "write_tiny_wan",
    "cosmos2": "write_tiny_cosmos2",
    "cosmos2.5": "write_tiny_cosmos2_5",
}
"""Name of `mobula init-model` without `tiny-` -> function of `models`."""


def write_tiny_flow(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the tiny model `name` of `TINY_FLOW` into `folder`, and return `folder`."""
    try:
        from mobula.learner.policies.flow.tiny import models
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise
        raise ValueError(
            f"tiny-{name} is written by diffusers, which is not installed: pip install mobula[visual]"
        ) from error
    return getattr(models, TINY_FLOW[name])(folder, seed=seed)
