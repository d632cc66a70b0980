"""A Flux.1 dev of random weights: a CLIP, a T5, a VAE that halves each side, and one block of each of its two kinds."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from mobula.learner.policies.flow.tiny.text_encoders import clip_tokenizer, plain_clip_encoder, t5_encoder, t5_tokenizer
from mobula.learner.policies.flow.tiny.vaes import CHANNELS, image_vae

CLIP_SIZE, T5_SIZE = 32, 32


def write_tiny_flux(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline for images of 32 x 32 into `folder`, and return `folder`."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = FluxPipeline(
            transformer=FluxTransformer2DModel(
                patch_size=1,
                in_channels=4 * CHANNELS,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=4,
                joint_attention_dim=T5_SIZE,
                pooled_projection_dim=CLIP_SIZE,
                axes_dims_rope=(4, 4, 8),
                guidance_embeds=True,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=image_vae(),
            text_encoder=plain_clip_encoder(clip, CLIP_SIZE),
            tokenizer=clip,
            text_encoder_2=t5_encoder(t5, T5_SIZE),
            tokenizer_2=t5,
        )
    pipeline.save_pretrained(folder)
    return folder
