"""A Wan 2.1 of random weights: a UMT5, the video VAE at a small width, two blocks, and the released scheduler."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

from mobula.learner.policies.flow.tiny.text_encoders import t5_tokenizer, umt5_encoder
from mobula.learner.policies.flow.tiny.vaes import CHANNELS, video_vae

T5_SIZE = 32


def write_tiny_wan(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline for videos of 32 x 32 and more into `folder`, and return `folder`."""
    tokenizer = t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=umt5_encoder(tokenizer, T5_SIZE),
            vae=video_vae(),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            transformer=WanTransformer3DModel(
                in_channels=CHANNELS,
                out_channels=CHANNELS,
                num_attention_heads=4,
                attention_head_dim=24,
                text_dim=T5_SIZE,
                freq_dim=32,
                ffn_dim=128,
                num_layers=2,
                rope_max_seq_len=64,
            ),
        )
    pipeline.save_pretrained(folder)
    return folder
