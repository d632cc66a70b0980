"""Tiny flow models of random weights in the layout that diffusers saves, one file for each family."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

TINY_FLOW = {
    "sd3": ("sd3", "write_tiny_sd3"),
    "sd3_glyphs": ("sd3_glyphs", "write_tiny_sd3_glyphs"),
    "flux": ("flux", "write_tiny_flux"),
    "qwen-image": ("qwen_image", "write_tiny_qwen_image"),
    "sana": ("sana", "write_tiny_sana"),
    "wan": ("wan", "write_tiny_wan"),
    "cosmos2": ("cosmos", "write_tiny_cosmos2"),
    "cosmos2.5": ("cosmos", "write_tiny_cosmos2_5"),
}
"""Name of `mobula init-model` without `tiny-` -> (module here, function of it)."""


def write_tiny_flow(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the tiny model `name` of `TINY_FLOW` into `folder`, and return `folder`."""
    module_name, function = TINY_FLOW[name]
    try:
        module = import_module(f"{__name__}.{module_name}")
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise
        raise ValueError(
            f"tiny-{name} is written by diffusers, which is not installed: pip install mobula[visual]"
        ) from error
    return getattr(module, function)(folder, seed=seed)
