"""A Qwen-Image of random weights: the tiny Qwen2.5-VL, a VAE that makes each side an eighth, and two joint blocks."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

from mobula.learner.policies.flow.tiny.text_encoders import qwen_encoder
from mobula.learner.policies.flow.tiny.vaes import CHANNELS, qwen_image_vae


def write_tiny_qwen_image(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline for images of 32 x 32 and more into `folder`, and return `folder`."""
    encoder, tokenizer = qwen_encoder(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            transformer=QwenImageTransformer2DModel(
                in_channels=4 * CHANNELS,
                out_channels=CHANNELS,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=4,
                joint_attention_dim=encoder.config.get_text_config().hidden_size,
                axes_dims_rope=(8, 4, 4),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=qwen_image_vae(),
            text_encoder=encoder,
            tokenizer=tokenizer,
        )
    pipeline.save_pretrained(folder)
    return folder
