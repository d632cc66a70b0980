"""A Sana of random weights: a Gemma 2, a VAE that halves each side, two blocks of linear attention, and the released
scheduler.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

from mobula.learner.policies.flow.tiny.text_encoders import gemma_encoder, gemma_tokenizer
from mobula.learner.policies.flow.tiny.vaes import deep_vae

CHANNELS = 8  # of latents
GEMMA_SIZE = 32


def write_tiny_sana(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline for images of 32 x 32 into `folder`, and return `folder`."""
    tokenizer = gemma_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = SanaPipeline(
            tokenizer=tokenizer,
            text_encoder=gemma_encoder(tokenizer, GEMMA_SIZE),
            vae=deep_vae(CHANNELS),
            transformer=SanaTransformer2DModel(
                in_channels=CHANNELS,
                out_channels=CHANNELS,
                num_attention_heads=4,
                attention_head_dim=16,
                num_layers=2,
                num_cross_attention_heads=4,
                cross_attention_head_dim=16,
                cross_attention_dim=64,
                caption_channels=GEMMA_SIZE,
                sample_size=16,
            ),
            scheduler=DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
        )
    pipeline.save_pretrained(folder)
    return folder
