"""Small VAEs of random weights."""

from __future__ import annotations

from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan

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
