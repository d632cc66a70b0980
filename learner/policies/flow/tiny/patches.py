"""A tiny NextStep of random weights, in the layout of the released checkpoints, that draws grey images of 16 x 16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mobula.learner.policies.nextstep.model import AREA, NextStep, NextStepConfig
from mobula.learner.policies.tiny.writing import build_tokenizer, decoder_config, token_id

TINY_PATCHES = "nextstep"  # `mobula init-model` without `tiny-`
PATCH = 4  # pixels; the VAE's latents are grey levels, as many as pixels
BEGIN, END, PLACEHOLDER = "<|begin_of_image|>", "<|end_of_image|>", "<|image_placeholder|>"


def write_tiny_patches(folder: Path, *, seed: int = 0) -> Path:
    """Writes a checkpoint of 0.8 M parameters into `folder`, and returns `folder`."""
    try:
        from mobula.learner.policies.flow.tiny.models import pixel_codec
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise
        raise ValueError("tiny-nextstep needs diffusers, which is not installed: pip install mobula[visual]") from error
    tokenizer = build_tokenizer(("<|endoftext|>", "<|im_end|>", AREA, BEGIN, END, PLACEHOLDER))
    ids: dict[str, Any] = {
        name: token_id(tokenizer, token)
        for name, token in {"boi": BEGIN, "eoi": END, "image_placeholder_id": PLACEHOLDER}.items()
    }
    config = NextStepConfig(
        **decoder_config(tokenizer, num_hidden_layers=3),
        **ids,
        latent_size=16,
        latent_channels=1,
        latent_patch_size=PATCH,
        fm_head_dim=128,
        fm_head_layers=3,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NextStep(config)
    for name, weight in model.named_parameters():  # a new head predicts 0, and its blocks are the identity
        if name.endswith(("adaLN_modulation.1.weight", "final_layer.linear.weight")):
            torch.nn.init.zeros_(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pixel_codec(1).save_pretrained(folder / "vae")
    return folder
