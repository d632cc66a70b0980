"""Tiny flow models of random weights in the layout that diffusers saves, one file for each family."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

TINY_FLOW = {"sd3": "write_tiny_sd3", "sd3_glyphs": "write_tiny_sd3_glyphs"}
"""Name of `mobula init-model` without `tiny-` -> function of the module of that name here."""


def write_tiny_flow(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the tiny model `name` of `TINY_FLOW` into `folder`, and return `folder`.

    Raises:
        ValueError: diffusers is not installed.
    """
    try:
        module = import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise
        raise ValueError(
            f"tiny-{name} is written by diffusers, which is not installed: pip install mobula[visual]"
        ) from error
    return getattr(module, TINY_FLOW[name])(folder, seed=seed)
