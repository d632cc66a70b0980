"""Text encoders and autoencoders of tiny flow models."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    PreTrainedModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from mobula.learner.policies.tiny import TINY

CLIP_TOKENS, T5_TOKENS, GEMMA_TOKENS = 77, 64, 64  # longest prompts


START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer() -> CLIPTokenizer:
    """One token a byte, another one where it ends a word."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=CLIP_TOKENS)


def clip_encoder(tokenizer: CLIPTokenizer, hidden_size: int) -> CLIPTextModelWithProjection:
    """Two layers; the pooled embedding is as wide as the others."""
    return CLIPTextModelWithProjection(_clip_config(tokenizer, hidden_size))


def plain_clip_encoder(tokenizer: CLIPTokenizer, hidden_size: int) -> CLIPTextModel:
    """Two layers, without a projection."""
    return CLIPTextModel(_clip_config(tokenizer, hidden_size))


def _clip_config(tokenizer: CLIPTokenizer, hidden_size: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=hidden_size,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_tokenizer() -> T5Tokenizer:
    """One token for each printable ASCII character."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -5.0) for code in range(ord("!"), ord("~") + 1)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_TOKENS)


def t5_encoder(tokenizer: T5Tokenizer, hidden_size: int) -> T5EncoderModel:
    """Two layers."""
    return T5EncoderModel(T5Config(**_t5_sizes(tokenizer, hidden_size)))


def umt5_encoder(tokenizer: T5Tokenizer, hidden_size: int) -> UMT5EncoderModel:
    """Two layers, each with position biases of its own."""
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer, hidden_size)))


def _t5_sizes(tokenizer: T5Tokenizer, hidden_size: int) -> dict[str, Any]:
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


def gemma_tokenizer() -> GemmaTokenizer:
    """One token for each printable ASCII character."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *map(chr, range(ord("!"), ord("~") + 1))]
    vocab = {token: index for index, token in enumerate(tokens)}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=GEMMA_TOKENS)


def gemma_encoder(tokenizer: GemmaTokenizer, hidden_size: int) -> Gemma2Model:
    """Two layers."""
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=GEMMA_TOKENS,
    )
    return Gemma2Model(config)


def qwen_encoder(seed: int) -> tuple[PreTrainedModel, Qwen2Tokenizer]:
    """The tiny Qwen2.5-VL and its tokenizer, with the chat template that a pipeline without processor looks for."""
    row = TINY["qwen2.5-vl"]
    tokenizer = row.new_tokenizer()
    return row.new_model(tokenizer, seed=seed), tokenizer


CHANNELS = 16  # of latents


def image_vae() -> AutoencoderKL:
    """One halving; scale and shift are those of Stable Diffusion 3."""
    return AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=CHANNELS,
        norm_num_groups=8,
        layers_per_block=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        sample_size=32,
    )


def video_vae() -> AutoencoderKLWan:
    """As Wan 2.1 has it: an eighth of each side, and a latent frame for four frames."""
    return AutoencoderKLWan(
        base_dim=8, z_dim=CHANNELS, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def qwen_image_vae() -> AutoencoderKLQwenImage:
    """An eighth of each side."""
    return AutoencoderKLQwenImage(
        base_dim=8, z_dim=CHANNELS, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def deep_vae(channels: int) -> AutoencoderDC:
    """One halving."""
    return AutoencoderDC(
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
