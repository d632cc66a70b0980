"""A Stable Diffusion 3.5 of random weights: two CLIPs, a T5, a VAE that halves each side, and a small transformer."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from mobula.learner.policies.flow.tiny.text_encoders import clip_encoder, clip_tokenizer, t5_encoder, t5_tokenizer
from mobula.learner.policies.flow.tiny.vaes import CHANNELS, image_vae

CLIP_SIZE, HIDDEN_SIZE = 32, 64


def write_tiny_sd3(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline of 0.6 M parameters into `folder`, for images of 32 x 32, and return `folder`."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=image_vae(),
            text_encoder=clip_encoder(clip, CLIP_SIZE),
            tokenizer=clip,
            text_encoder_2=clip_encoder(clip, CLIP_SIZE),
            tokenizer_2=clip,
            text_encoder_3=t5_encoder(t5, HIDDEN_SIZE),
            tokenizer_3=t5,
        )
    pipeline.save_pretrained(folder)
    return folder


def _transformer() -> SD3Transformer2DModel:
    """Two joint blocks, the first with the second attention of SD3.5."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=HIDDEN_SIZE,
        caption_projection_dim=HIDDEN_SIZE,
        pooled_projection_dim=2 * CLIP_SIZE,
        pos_embed_max_size=32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
