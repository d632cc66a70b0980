"""Tiny flow models: their text encoders, autoencoders and pipelines in the layout of released ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import torch
import transformers as hf
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

from mobula.learner.policies.tiny import TINY

CLIP_TOKENS, T5_TOKENS, GEMMA_TOKENS = 77, 64, 64  # longest prompts
TEXT_SIZE, WIDE_TEXT_SIZE = 32, 64  # embeddings of text encoders
LAYERS: dict[str, Any] = {  # of an encoder of texts or images
    "hidden_size": TEXT_SIZE,
    "intermediate_size": 2 * TEXT_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
VIDEO_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 24}
START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer() -> hf.CLIPTokenizer:
    """One token a byte, another one where it ends a word."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    return hf.CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=CLIP_TOKENS)


def clip_encoder(tokenizer: hf.CLIPTokenizer) -> hf.CLIPTextModelWithProjection:
    """The pooled embedding is as wide as the others."""
    return hf.CLIPTextModelWithProjection(_clip_config(tokenizer))


def _clip_config(tokenizer: hf.CLIPTokenizer) -> hf.CLIPTextConfig:
    return hf.CLIPTextConfig(
        **LAYERS,
        vocab_size=len(tokenizer),
        projection_dim=TEXT_SIZE,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_tokenizer() -> hf.T5Tokenizer:
    """One token for each printable ASCII character."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -5.0) for code in range(ord("!"), ord("~") + 1)]
    return hf.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_TOKENS)


def t5_encoder(tokenizer: hf.T5Tokenizer, hidden_size: int) -> hf.T5EncoderModel:
    return hf.T5EncoderModel(hf.T5Config(**_t5_sizes(tokenizer, hidden_size)))


def _t5_sizes(tokenizer: hf.T5Tokenizer, hidden_size: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": hidden_size,
        "d_kv": 16,
        "d_ff": 2 * hidden_size,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }


def gemma_tokenizer() -> hf.GemmaTokenizer:
    """One token for each printable ASCII character."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *map(chr, range(ord("!"), ord("~") + 1))]
    vocab = {token: index for index, token in enumerate(tokens)}
    return hf.GemmaTokenizer(vocab=vocab, merges=[], model_max_length=GEMMA_TOKENS)


def gemma_encoder(tokenizer: hf.GemmaTokenizer) -> hf.Gemma2Model:
    config = hf.Gemma2Config(
        **LAYERS,
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=GEMMA_TOKENS,
    )
    return hf.Gemma2Model(config)


def language_model(name: str, seed: int, **text: Any) -> tuple[hf.PreTrainedModel, hf.Qwen2Tokenizer]:
    """The model `name` of `TINY`, with other settings `text` of its decoder if there are any, and its tokenizer, with
    the chat template that a pipeline without processor looks for."""
    row = replace(TINY[name], text=text) if text else TINY[name]
    tokenizer = row.new_tokenizer()
    return row.new_model(tokenizer, seed=seed), tokenizer


CHANNELS = 16  # of latents
IMAGE_VAE: dict[str, Any] = {
    "block_out_channels": (16, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": CHANNELS,
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "sample_size": 32,
}
VIDEO_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": CHANNELS,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}


def image_vae() -> diffusers.AutoencoderKL:
    """One halving; scale and shift are those of Stable Diffusion 3."""
    return diffusers.AutoencoderKL(
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5305, shift_factor=0.0609, **IMAGE_VAE
    )


def video_vae() -> diffusers.AutoencoderKLWan:
    """As Wan 2.1 has it: an eighth of each side, and a latent frame for four frames."""
    return diffusers.AutoencoderKLWan(**VIDEO_VAE)


def deep_vae(channels: int) -> diffusers.AutoencoderDC:
    """One halving."""
    return diffusers.AutoencoderDC(
        latent_channels=channels,
        attention_head_dim=8,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )


NewEncoder = Callable[[hf.CLIPTokenizer], hf.CLIPTextModelWithProjection]


def sd3(seed: int) -> Any:
    """Pipeline of 0.6 M parameters, for images of 32 x 32; the first of two joint blocks has the second attention of
    SD3.5."""
    transformer = _sd3_transformer(16, 2, CHANNELS, num_layers=2, dual_attention_layers=(0,))
    return _sd3_pipeline(transformer, image_vae(), clip_tokenizer(), clip_encoder)


def sd3_img2img(seed: int) -> Any:
    """The same as a pipeline that starts from an image."""
    parts = {name: part for name, part in sd3(seed).components.items() if part is not None}
    return diffusers.StableDiffusion3Img2ImgPipeline(**parts)


def _sd3_pipeline(
    transformer: diffusers.SD3Transformer2DModel, vae: Any, clip: hf.CLIPTokenizer, new_encoder: NewEncoder
) -> Any:
    t5 = t5_tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=new_encoder(clip),
        tokenizer=clip,
        text_encoder_2=new_encoder(clip),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(t5, WIDE_TEXT_SIZE),
        tokenizer_3=t5,
    )


def _sd3_transformer(side: int, patch: int, channels: int, **own: Any) -> diffusers.SD3Transformer2DModel:
    return diffusers.SD3Transformer2DModel(
        sample_size=side,
        patch_size=patch,
        in_channels=channels,
        out_channels=channels,
        joint_attention_dim=WIDE_TEXT_SIZE,
        caption_projection_dim=WIDE_TEXT_SIZE,
        pooled_projection_dim=2 * TEXT_SIZE,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
        **HEADS,
        **own,
    )


def flux(seed: int) -> Any:
    """Pipeline for images of 32 x 32."""
    return _flux_pipeline(diffusers.FluxPipeline, image_vae(), CHANNELS)


def flux_kontext(seed: int) -> Any:
    """Pipeline that edits images of 32 x 32."""
    return _flux_pipeline(diffusers.FluxKontextPipeline, image_vae(), CHANNELS)


def _flux_pipeline(pipeline: Any, vae: Any, channels: int, **own: Any) -> Any:
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    sizes: dict[str, Any] = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True, **own}
    return pipeline(
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * channels,
            joint_attention_dim=TEXT_SIZE,
            pooled_projection_dim=TEXT_SIZE,
            axes_dims_rope=(4, 4, 8),
            **HEADS,
            **sizes,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=hf.CLIPTextModel(_clip_config(clip)),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5, TEXT_SIZE),
        tokenizer_2=t5,
    )


def flux2(seed: int) -> Any:
    """FLUX.2 klein for images of 32 x 32; the pipeline reads layers 9, 18 and 27 of its text encoder."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    encoder, tokenizer = language_model("qwen3", seed, **small, head_dim=16, num_hidden_layers=28)
    return diffusers.Flux2KleinPipeline(
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=4 * CHANNELS,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=3 * small["hidden_size"],
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
            **HEADS,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLFlux2(**IMAGE_VAE),
        text_encoder=encoder,
        tokenizer=tokenizer,
    )


def z_image(seed: int) -> Any:
    """Pipeline for images of 32 x 32."""
    encoder, tokenizer = language_model("qwen3", seed)
    return diffusers.ZImagePipeline(
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=CHANNELS,
            dim=64,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=4,
            n_kv_heads=4,
            cap_feat_dim=encoder.config.hidden_size,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(),
        text_encoder=encoder,
        tokenizer=tokenizer,
    )


def qwen_image(seed: int) -> Any:
    """Pipeline for images of 32 x 32 and more."""
    return _qwen_image_pipeline(diffusers.QwenImagePipeline, seed)


def qwen_image_edit(seed: int) -> Any:
    """Pipeline that edits images of 32 x 32 and more."""
    row = TINY["qwen2.5-vl"]
    return _qwen_image_pipeline(diffusers.QwenImageEditPipeline, seed, processor=row.new_processor(row.new_tokenizer()))


def _qwen_image_pipeline(pipeline: Any, seed: int, **own: Any) -> Any:
    encoder, tokenizer = language_model("qwen2.5-vl", seed)
    return pipeline(
        transformer=diffusers.QwenImageTransformer2DModel(
            in_channels=4 * CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            joint_attention_dim=encoder.config.get_text_config().hidden_size,
            axes_dims_rope=(8, 4, 4),
            **HEADS,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage(**VIDEO_VAE),
        text_encoder=encoder,
        tokenizer=tokenizer,
        **own,
    )


FLOW_LEVELS: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SANA_CHANNELS = 8  # of latents


def sana(seed: int) -> Any:
    """Pipeline for images of 32 x 32."""
    tokenizer = gemma_tokenizer()
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma_encoder(tokenizer),
        vae=deep_vae(SANA_CHANNELS),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=SANA_CHANNELS,
            out_channels=SANA_CHANNELS,
            num_layers=2,
            num_cross_attention_heads=4,
            cross_attention_head_dim=16,
            cross_attention_dim=64,
            caption_channels=TEXT_SIZE,
            sample_size=16,
            **HEADS,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(**FLOW_LEVELS),
    )


def wan(seed: int) -> Any:
    """Pipeline for videos of 32 x 32 and more."""
    return _wan_pipeline(diffusers.WanPipeline, {})


def wan2_2(seed: int) -> Any:
    """The same with two transformers; that for high noise levels has the first of four steps, or two."""
    shape = {"in_channels": CHANNELS}
    return _wan_pipeline(diffusers.WanPipeline, {}, transformer_2=_wan_transformer(shape), boundary_ratio=0.875)


def wan_i2v(seed: int) -> Any:
    """Pipeline that continues an image of 32 x 32 and more."""
    clip = hf.CLIPVisionModel(hf.CLIPVisionConfig(image_size=32, patch_size=8, **LAYERS))
    images = hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    network = {"in_channels": 2 * CHANNELS + 4, "image_dim": clip.config.hidden_size, "added_kv_proj_dim": 4 * 24}
    return _wan_pipeline(diffusers.WanImageToVideoPipeline, network, image_encoder=clip, image_processor=images)


def _wan_pipeline(pipeline: Any, network: dict[str, int], **own: Any) -> Any:
    tokenizer = t5_tokenizer()
    return pipeline(
        tokenizer=tokenizer,
        text_encoder=hf.UMT5EncoderModel(hf.UMT5Config(**_t5_sizes(tokenizer, TEXT_SIZE))),
        vae=video_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(**FLOW_LEVELS),
        transformer=_wan_transformer({"in_channels": CHANNELS, **network}),
        **own,
    )


def _wan_transformer(shape: dict[str, int]) -> diffusers.WanTransformer3DModel:
    return diffusers.WanTransformer3DModel(
        out_channels=CHANNELS,
        text_dim=TEXT_SIZE,
        freq_dim=32,
        ffn_dim=128,
        num_layers=2,
        rope_max_seq_len=64,
        **VIDEO_HEADS,
        **shape,
    )


# Cosmos Predict 2 and 2.5 of random weights: a T5 or the tiny Qwen2.5-VL, Wan's video VAE, and two blocks.
#
# They come without a safety checker, as the released checkpoints do; plain diffusers wants one to be given.


def cosmos2(seed: int) -> Any:
    """Cosmos Predict 2 for images of 32 x 32 and more."""
    tokenizer = t5_tokenizer()
    return _cosmos_pipeline(
        diffusers.Cosmos2TextToImagePipeline,
        text_encoder=t5_encoder(tokenizer, WIDE_TEXT_SIZE),
        tokenizer=tokenizer,
        transformer=_cosmos_transformer(CHANNELS),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
    )


def cosmos2_5(seed: int) -> Any:
    """Cosmos Predict 2.5 for videos of 32 x 32 and more."""
    encoder, tokenizer = language_model("qwen2.5-vl", seed)
    text = encoder.config.get_text_config()
    return _cosmos_pipeline(
        diffusers.Cosmos2_5_PredictBasePipeline,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=_cosmos_transformer(
            CHANNELS + 1,  # latents and which of them are given
            use_crossattn_projection=True,
            crossattn_proj_in_channels=text.num_hidden_layers * text.hidden_size,
            encoder_hidden_states_channels=WIDE_TEXT_SIZE,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


def _cosmos_pipeline(pipeline: Any, **parts: Any) -> Any:
    made = pipeline(**parts, vae=video_vae(), safety_checker=nn.Identity())
    made.register_modules(safety_checker=None)
    return made


def _cosmos_transformer(in_channels: int, **own: Any) -> diffusers.CosmosTransformer3DModel:
    return diffusers.CosmosTransformer3DModel(
        in_channels=in_channels,
        out_channels=CHANNELS,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=WIDE_TEXT_SIZE,
        adaln_lora_dim=8,
        max_size=(4, 16, 16),
        patch_size=(1, 2, 2),
        rope_scale=(1.0, 4.0, 4.0),
        concat_padding_mask=True,
        extra_pos_embed_type=None,
        **VIDEO_HEADS,
        **own,
    )


SIDE, PATCH = 16, 4  # pixels
GLYPHS_CLIP_TOKENS = 10  # `write 42` takes nine
SCALE = 0.1  # of latents in the decoder, whose tanh is a straight line there


def sd3_glyphs(seed: int) -> Any:
    """Pipeline of 0.6 M parameters, for images of 16 x 16.

    Its text encoders are frozen, so they are made to tell prompts apart: weights are drawn large. Blocks and output of
    the transformer begin at 0, as in Scalable Diffusion Models with Transformers, arXiv:2212.09748.
    """
    clip = clip_tokenizer()
    clip.model_max_length = GLYPHS_CLIP_TOKENS
    transformer = _sd3_transformer(SIDE, PATCH, 1, num_layers=3)
    _begin_at_zero(transformer)
    return _sd3_pipeline(transformer, pixel_codec(1), clip, lambda tokenizer: _make_loud(clip_encoder(tokenizer)))


def flux_kontext_letters(seed: int) -> Any:
    """Pipeline of 0.3 M parameters that edits images of 12 x 12, with the same beginning."""
    pipeline = _flux_pipeline(
        diffusers.FluxKontextPipeline, pixel_codec(3), 3, num_layers=2, num_single_layers=2, guidance_embeds=False
    )
    _begin_at_zero(pipeline.transformer)
    for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
        _make_loud(encoder)
    return pipeline


def _begin_at_zero(transformer: nn.Module) -> None:
    at_zero = (".norm.linear.", ".norm1.linear.", ".norm1_context.linear.", "norm_out.linear.", "proj_out.")
    for name, parameter in transformer.named_parameters():
        if any(part in name for part in at_zero):
            nn.init.zeros_(parameter)


@torch.no_grad()
def pixel_codec(channels: int) -> diffusers.AutoencoderTiny:
    """A VAE whose latents are the levels of the pixels, from -1 to 1, as large as the image: their mean, or all three
    channels."""
    vae = diffusers.AutoencoderTiny(
        latent_channels=channels,
        encoder_block_out_channels=(max(2, channels),),
        decoder_block_out_channels=(2 * channels,),
        num_encoder_blocks=(0,),
        num_decoder_blocks=(0,),
        scaling_factor=1 / SCALE,
    )
    mixed, scaled = vae.encoder.layers  # of pixels from 0 to 1
    signs, _, joined = vae.decoder.layers  # the middle one is a ReLU, so both signs of a number pass it
    for layer in (mixed, scaled, signs, joined):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    same = torch.eye(channels)
    mixed.weight[:channels, :, 1, 1] = same if channels == 3 else 1 / 3
    scaled.weight[:, :channels, 1, 1] = 2 * SCALE * same
    scaled.bias.fill_(-SCALE)
    signs.weight[:, :, 1, 1] = torch.cat([same, -same])
    joined.weight[:, :, 1, 1] = torch.cat([same, -same], 1).expand(3, -1) / (2 * SCALE)
    joined.bias.fill_(0.5)
    return vae


def _make_loud(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.0 if "embedding" in name else 1 / math.sqrt(parameter.shape[-1]))
    return model
