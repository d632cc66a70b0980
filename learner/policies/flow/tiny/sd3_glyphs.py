"""A Stable Diffusion 3 that learns to write numbers on a CPU: latents are grey images of 16x16 themselves."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from mobula.learner.policies.flow.tiny.text_encoders import clip_encoder, clip_tokenizer, t5_encoder, t5_tokenizer

SIDE, PATCH = 16, 4  # pixels
CLIP_SIZE, HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS = 32, 64, 3, 4
CLIP_TOKENS = 10  # `write 42` takes nine
SCALE = 0.1  # of latents in the decoder, whose tanh is a straight line there


def write_tiny_sd3_glyphs(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline of 0.6 M parameters into `folder`, for images of 16 x 16, and return `folder`.

    Its text encoders are frozen, so they are made to tell prompts apart: weights are drawn large. Blocks and output of
    the transformer begin at 0, as in Scalable Diffusion Models with Transformers, arXiv:2212.09748.
    """
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    clip.model_max_length = CLIP_TOKENS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=grey_codec(),
            text_encoder=_loud_clip(clip),
            tokenizer=clip,
            text_encoder_2=_loud_clip(clip),
            tokenizer_2=clip,
            text_encoder_3=t5_encoder(t5, HIDDEN_SIZE),
            tokenizer_3=t5,
        )
    pipeline.save_pretrained(folder)
    return folder


@torch.no_grad()
def grey_codec() -> AutoencoderTiny:
    """A VAE whose latents are the grey levels of the pixels, from -1 to 1: one channel, as large as the image."""
    vae = AutoencoderTiny(
        latent_channels=1,
        encoder_block_out_channels=(2,),
        decoder_block_out_channels=(2,),
        num_encoder_blocks=(0,),
        num_decoder_blocks=(0,),
        scaling_factor=1 / SCALE,
    )
    mean, scaled = vae.encoder.layers  # of pixels from 0 to 1
    signs, _, joined = vae.decoder.layers  # the middle one is a ReLU, so both signs of a number pass it
    for layer in (mean, scaled, signs, joined):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    mean.weight[0, :, 1, 1] = 1 / 3
    scaled.weight[0, 0, 1, 1] = 2 * SCALE
    scaled.bias.fill_(-SCALE)
    signs.weight[:, 0, 1, 1] = torch.tensor([1.0, -1.0])
    joined.weight[:, :, 1, 1] = torch.tensor([1.0, -1.0]) / (2 * SCALE)
    joined.bias.fill_(0.5)
    return vae


def _transformer() -> SD3Transformer2DModel:
    model = SD3Transformer2DModel(
        sample_size=SIDE,
        patch_size=PATCH,
        in_channels=1,
        out_channels=1,
        num_layers=NUM_LAYERS,
        attention_head_dim=HIDDEN_SIZE // NUM_HEADS,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=HIDDEN_SIZE,
        caption_projection_dim=HIDDEN_SIZE,
        pooled_projection_dim=2 * CLIP_SIZE,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
    )
    at_zero = (".norm1.linear.", ".norm1_context.linear.", "norm_out.linear.", "proj_out.")
    for name, parameter in model.named_parameters():
        if any(part in name for part in at_zero):
            nn.init.zeros_(parameter)
    return model


def _loud_clip(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    model = clip_encoder(tokenizer, CLIP_SIZE)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.0 if "embedding" in name else 1 / math.sqrt(parameter.shape[-1]))
    return model
