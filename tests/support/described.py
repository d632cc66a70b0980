"""Checkpoints that are only described: a config.json without weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from transformers import Qwen2_5_VLConfig

from mobula.learner.policies.shapes import ModelShape, shape_of_config


def qwen_config(*, hidden: int, layers: int, intermediate: int | None = None) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL with the vision tower of the released ones."""
    found = Qwen2_5_VLConfig()
    text, vision = found.text_config, found.vision_config
    heads = hidden // 128
    text.hidden_size, text.num_hidden_layers, text.intermediate_size = hidden, layers, intermediate or 4 * hidden
    text.num_attention_heads, text.num_key_value_heads = heads, max(1, heads // 7)
    text.layer_types, text.max_window_layers = text.layer_types[:layers], layers
    vision.hidden_size, vision.out_hidden_size = 1280, hidden
    return found


@cache
def qwen(*, hidden: int, layers: int) -> ModelShape:
    return shape_of_config(qwen_config(hidden=hidden, layers=layers))


@cache
def shape_7b() -> ModelShape:
    return shape_of_config(qwen_config(hidden=3584, layers=28, intermediate=18944))


def checkpoint(folder: Path, *, hidden: int = 3584, layers: int = 28, intermediate: int = 18944) -> Path:
    """A folder with config.json alone."""
    qwen_config(hidden=hidden, layers=layers, intermediate=intermediate).save_pretrained(folder)
    return folder
