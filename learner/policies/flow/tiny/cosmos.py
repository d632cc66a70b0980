"""Cosmos Predict 2 and 2.5 of random weights: a T5 or the tiny Qwen2.5-VL, Wan's video VAE, and two blocks.

They come without a safety checker, as the released checkpoints do; plain diffusers wants one to be given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    Cosmos2_5_PredictBasePipeline,
    Cosmos2TextToImagePipeline,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from torch import nn

from mobula.learner.policies.flow.tiny.text_encoders import qwen_encoder, t5_encoder, t5_tokenizer
from mobula.learner.policies.flow.tiny.vaes import CHANNELS, video_vae

T5_SIZE = 64


def write_tiny_cosmos2(folder: Path, *, seed: int = 0) -> Path:
    """Write a Cosmos Predict 2 for images of 32 x 32 and more into `folder`, and return `folder`."""
    tokenizer = t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = Cosmos2TextToImagePipeline(
            text_encoder=t5_encoder(tokenizer, T5_SIZE),
            tokenizer=tokenizer,
            transformer=_transformer(CHANNELS, T5_SIZE),
            vae=video_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
            safety_checker=nn.Identity(),
        )
    return _saved(pipeline, folder)


def write_tiny_cosmos2_5(folder: Path, *, seed: int = 0) -> Path:
    """Write a Cosmos Predict 2.5 for videos of 32 x 32 and more into `folder`, and return `folder`."""
    encoder, tokenizer = qwen_encoder(seed)
    text = encoder.config.get_text_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = Cosmos2_5_PredictBasePipeline(
            text_encoder=encoder,
            tokenizer=tokenizer,
            transformer=_transformer(
                CHANNELS + 1,  # latents and which of them are given
                T5_SIZE,
                use_crossattn_projection=True,
                crossattn_proj_in_channels=text.num_hidden_layers * text.hidden_size,
                encoder_hidden_states_channels=T5_SIZE,
            ),
            vae=video_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            safety_checker=nn.Identity(),
        )
    return _saved(pipeline, folder)


def _transformer(in_channels: int, text_size: int, **own: Any) -> CosmosTransformer3DModel:
    return CosmosTransformer3DModel(
        in_channels=in_channels,
        out_channels=CHANNELS,
        num_attention_heads=4,
        attention_head_dim=24,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=text_size,
        adaln_lora_dim=8,
        max_size=(4, 16, 16),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 4.0, 4.0),
        concat_padding_mask=True,
        extra_pos_embed_type=None,
        **own,
    )


def _saved(pipeline: Any, folder: Path) -> Path:
    pipeline.register_modules(safety_checker=None)
    pipeline.save_pretrained(folder)
    return folder
