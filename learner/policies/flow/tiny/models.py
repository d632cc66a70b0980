"""Tiny flow models in the layout of released pipelines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderTiny,
    Cosmos2_5_PredictBasePipeline,
    Cosmos2TextToImagePipeline,
    CosmosTransformer3DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from mobula.learner.policies.flow.tiny.parts import (
    CHANNELS,
    clip_encoder,
    clip_tokenizer,
    deep_vae,
    gemma_encoder,
    gemma_tokenizer,
    image_vae,
    plain_clip_encoder,
    qwen_encoder,
    qwen_image_vae,
    t5_encoder,
    t5_tokenizer,
    umt5_encoder,
    video_vae,
)

SD3_CLIP_SIZE, SD3_HIDDEN_SIZE = 32, 64


def write_tiny_sd3(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline of 0.6 M parameters into `folder`, for images of 32 x 32, and return `folder`."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer_sd3(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=image_vae(),
            text_encoder=clip_encoder(clip, SD3_CLIP_SIZE),
            tokenizer=clip,
            text_encoder_2=clip_encoder(clip, SD3_CLIP_SIZE),
            tokenizer_2=clip,
            text_encoder_3=t5_encoder(t5, SD3_HIDDEN_SIZE),
            tokenizer_3=t5,
        )
    pipeline.save_pretrained(folder)
    return folder


def _transformer_sd3() -> SD3Transformer2DModel:
    """Two joint blocks, the first with the second attention of SD3.5."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=SD3_HIDDEN_SIZE,
        caption_projection_dim=SD3_HIDDEN_SIZE,
        pooled_projection_dim=2 * SD3_CLIP_SIZE,
        pos_embed_max_size=32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


FLUX_CLIP_SIZE, FLUX_T5_SIZE = 32, 32


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
                joint_attention_dim=FLUX_T5_SIZE,
                pooled_projection_dim=FLUX_CLIP_SIZE,
                axes_dims_rope=(4, 4, 8),
                guidance_embeds=True,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=image_vae(),
            text_encoder=plain_clip_encoder(clip, FLUX_CLIP_SIZE),
            tokenizer=clip,
            text_encoder_2=t5_encoder(t5, FLUX_T5_SIZE),
            tokenizer_2=t5,
        )
    pipeline.save_pretrained(folder)
    return folder


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


SANA_CHANNELS = 8  # of latents


GEMMA_SIZE = 32


def write_tiny_sana(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline for images of 32 x 32 into `folder`, and return `folder`."""
    tokenizer = gemma_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = SanaPipeline(
            tokenizer=tokenizer,
            text_encoder=gemma_encoder(tokenizer, GEMMA_SIZE),
            vae=deep_vae(SANA_CHANNELS),
            transformer=SanaTransformer2DModel(
                in_channels=SANA_CHANNELS,
                out_channels=SANA_CHANNELS,
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


WAN_T5_SIZE = 32


def write_tiny_wan(folder: Path, *, seed: int = 0) -> Path:
    """Write a pipeline for videos of 32 x 32 and more into `folder`, and return `folder`."""
    tokenizer = t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=umt5_encoder(tokenizer, WAN_T5_SIZE),
            vae=video_vae(),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            transformer=WanTransformer3DModel(
                in_channels=CHANNELS,
                out_channels=CHANNELS,
                num_attention_heads=4,
                attention_head_dim=24,
                text_dim=WAN_T5_SIZE,
                freq_dim=32,
                ffn_dim=128,
                num_layers=2,
                rope_max_seq_len=64,
            ),
        )
    pipeline.save_pretrained(folder)
    return folder


# Cosmos Predict 2 and 2.5 of random weights: a T5 or the tiny Qwen2.5-VL, Wan's video VAE, and two blocks.
#
# They come without a safety checker, as the released checkpoints do; plain diffusers wants one to be given.

COSMOS_T5_SIZE = 64


def write_tiny_cosmos2(folder: Path, *, seed: int = 0) -> Path:
    """Write a Cosmos Predict 2 for images of 32 x 32 and more into `folder`, and return `folder`."""
    tokenizer = t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = Cosmos2TextToImagePipeline(
            text_encoder=t5_encoder(tokenizer, COSMOS_T5_SIZE),
            tokenizer=tokenizer,
            transformer=_transformer_cosmos(CHANNELS, COSMOS_T5_SIZE),
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
            transformer=_transformer_cosmos(
                CHANNELS + 1,  # latents and which of them are given
                COSMOS_T5_SIZE,
                use_crossattn_projection=True,
                crossattn_proj_in_channels=text.num_hidden_layers * text.hidden_size,
                encoder_hidden_states_channels=COSMOS_T5_SIZE,
            ),
            vae=video_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            safety_checker=nn.Identity(),
        )
    return _saved(pipeline, folder)


def _transformer_cosmos(in_channels: int, text_size: int, **own: Any) -> CosmosTransformer3DModel:
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


SIDE, PATCH = 16, 4  # pixels


SD3_GLYPHS_CLIP_SIZE, SD3_GLYPHS_HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS = 32, 64, 3, 4


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
            transformer=_transformer_sd3_glyphs(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=grey_codec(),
            text_encoder=_loud_clip(clip),
            tokenizer=clip,
            text_encoder_2=_loud_clip(clip),
            tokenizer_2=clip,
            text_encoder_3=t5_encoder(t5, SD3_GLYPHS_HIDDEN_SIZE),
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


def _transformer_sd3_glyphs() -> SD3Transformer2DModel:
    model = SD3Transformer2DModel(
        sample_size=SIDE,
        patch_size=PATCH,
        in_channels=1,
        out_channels=1,
        num_layers=NUM_LAYERS,
        attention_head_dim=SD3_GLYPHS_HIDDEN_SIZE // NUM_HEADS,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=SD3_GLYPHS_HIDDEN_SIZE,
        caption_projection_dim=SD3_GLYPHS_HIDDEN_SIZE,
        pooled_projection_dim=2 * SD3_GLYPHS_CLIP_SIZE,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
    )
    at_zero = (".norm1.linear.", ".norm1_context.linear.", "norm_out.linear.", "proj_out.")
    for name, parameter in model.named_parameters():
        if any(part in name for part in at_zero):
            nn.init.zeros_(parameter)
    return model


def _loud_clip(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    model = clip_encoder(tokenizer, SD3_GLYPHS_CLIP_SIZE)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.0 if "embedding" in name else 1 / math.sqrt(parameter.shape[-1]))
    return model
