"""Tiny models of random weights in the layout of released checkpoints, as rows of one table.

They run offline wherever released checkpoints run: tests, examples and CPU benchmarks train them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, ProcessorMixin, Qwen2Tokenizer

from mobula.learner.policies.families.vision import takes_encoded_images
from mobula.learner.policies.tiny.writing import (
    HIDDEN_SIZE,
    INITIALIZER_RANGE,
    TinyModel,
    audio_template,
    chat_template,
    rename,
    template_of,
    vision_config,
)

SIDE, TOKENS_PER_TILE = 56, 4
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MEDIA_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}  # sums to half of head_dim
FRAMES = {"min_frames": 2, "max_frames": 8}
RELEASED_TOWER = {"vision_tower.": "vision_tower.vision_model."}


def patches(side: int) -> dict[str, Any]:
    """Image processor settings: an image takes 1 to 64 tokens, one for each `side` x `side` pixels."""
    size = {"shortest_edge": side**2, "longest_edge": 64 * side**2}
    return {"size": size, "patch_size": side // 2, "merge_size": 2, "temporal_patch_size": 2}


def patch_tower(**own: Any) -> dict[str, Any]:
    """A vision tower of two blocks that merges four patches into one token."""
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "initializer_range": INITIALIZER_RANGE,
    } | own


# One windowed block, then one with full attention, so that both kinds are exercised.
WINDOWED_TOWER = patch_tower(window_size=112, fullatt_block_indexes=[1])


def qwen2_processor(kind: Callable[..., ProcessorMixin], tokenizer: Qwen2Tokenizer) -> ProcessorMixin:
    images = hf.Qwen2VLImageProcessor(**patches(28))
    videos = hf.Qwen2VLVideoProcessor(**FRAMES, cap_pixels_per_frame=True, **patches(28))
    return kind(images, tokenizer, videos)


def qwen3_vl_processor(tokenizer: Qwen2Tokenizer) -> ProcessorMixin:
    images = hf.Qwen2VLImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3, **patches(32))
    videos = hf.Qwen3VLVideoProcessor(**FRAMES, cap_pixels_per_frame=False, **patches(32))
    return hf.Qwen3VLProcessor(images, tokenizer, videos)


QWEN2_VL = TinyModel(
    model=hf.Qwen2VLForConditionalGeneration,
    processor=partial(qwen2_processor, hf.Qwen2VLProcessor),
    text={"rope_parameters": ROPE},
    config={
        "vision_config": {
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": HIDDEN_SIZE,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": INITIALIZER_RANGE,
        }
    },
    ids=MEDIA_IDS,
)

QWEN2_5_VL = TinyModel(
    model=hf.Qwen2_5_VLForConditionalGeneration,
    processor=partial(qwen2_processor, hf.Qwen2_5_VLProcessor),
    text={"rope_parameters": ROPE},
    text_names_tie=False,
    config={"vision_config": WINDOWED_TOWER},
    ids=MEDIA_IDS,
)

QWEN3_VL_TEXT = {"head_dim": 32, "rope_parameters": ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}}
QWEN3_TOWER = patch_tower(depth=3, patch_size=16, num_position_embeddings=16)
DEEPSTACK_TOWER = QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]}

QWEN3_VL = TinyModel(
    model=hf.Qwen3VLForConditionalGeneration,
    processor=qwen3_vl_processor,
    text=QWEN3_VL_TEXT,
    config={"vision_config": DEEPSTACK_TOWER},
    ids=MEDIA_IDS,
)


def transpose_experts(folder: Path, config: PretrainedConfig) -> None:
    """Released checkpoints hold experts as [E, H, 2 I] and [E, I, H]; transformers saves new ones as it computes."""
    file = folder / "model.safetensors"
    state = load_file(file)
    for name, tensor in state.items():
        if name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
            state[name] = tensor.transpose(1, 2).contiguous()
    save_file(state, file, metadata={"format": "pt"})


QWEN3_VL_MOE = TinyModel(
    model=hf.Qwen3VLMoeForConditionalGeneration,
    processor=qwen3_vl_processor,
    text={
        **QWEN3_VL_TEXT,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    config={"vision_config": DEEPSTACK_TOWER},
    ids=MEDIA_IDS,
    finish=transpose_experts,
)

QWEN3_5 = TinyModel(
    model=hf.Qwen3_5ForConditionalGeneration,
    processor=qwen3_vl_processor,
    text={
        "num_hidden_layers": 4,  # of which the last one has attention
        "head_dim": 64,
        "rope_parameters": {
            **ROPE,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
        "linear_key_head_dim": 128,  # the kernels on CPU refuse 32
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    config={"vision_config": QWEN3_TOWER},
    ids=MEDIA_IDS,
)


def internvl(**text: Any) -> TinyModel:
    """An InternVL of 0.5 M parameters; a tile of 56x56 pixels takes 4 tokens."""
    size = {"size": {"height": SIDE, "width": SIDE}}
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tower = vision_config(attention_bias=True, image_size=[SIDE, SIDE], patch_size=[14, 14])
    return TinyModel(
        model=hf.InternVLForConditionalGeneration,
        processor=lambda tokenizer: hf.InternVLProcessor(
            hf.GotOcr2ImageProcessor(crop_to_patches=True, min_patches=1, max_patches=4, **size),
            tokenizer,
            hf.InternVLVideoProcessor(**size),
            image_seq_length=TOKENS_PER_TILE,
        ),
        template=chat_template(image="<IMG_CONTEXT>\\n", video="<video>\\n"),
        tokenizer={"special": CHAT_TOKENS, "named": named},
        text=text,
        config={"vision_config": tower, "image_seq_length": TOKENS_PER_TILE, "downsample_ratio": 0.5},
        ids={"image_token_id": "<IMG_CONTEXT>"},
    )


TILES = {"size": {"height": SIDE, "width": SIDE}}
PINPOINTS = [[SIDE * i, SIDE * j] for i in (1, 2) for j in (1, 2)]

# An image takes at least two tiles of 16 tokens.
LLAVA_ONEVISION = TinyModel(
    model=hf.LlavaOnevisionForConditionalGeneration,
    processor=lambda tokenizer: hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(image_grid_pinpoints=PINPOINTS, **TILES),
        tokenizer,
        hf.LlavaOnevisionVideoProcessor(**TILES),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    ),
    template=chat_template(image="<image>\\n", video="<video>\\n"),
    tokenizer={"special": (*CHAT_TOKENS, "<image>", "<video>")},
    text={"model_type": "qwen2"},
    config={
        "vision_config": vision_config(
            model_type="siglip_vision_model", image_size=SIDE, patch_size=14, vision_use_head=False
        ),
        "image_grid_pinpoints": PINPOINTS,
    },
    ids={"image_token_index": "<image>", "video_token_index": "<video>"},
    finish=rename(RELEASED_TOWER),
)

# Every image takes 16 tokens.
LLAVA = TinyModel(
    model=hf.LlavaForConditionalGeneration,
    processor=lambda tokenizer: hf.LlavaProcessor(
        hf.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=TILES["size"]),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ),
    template=chat_template(image="<image>\\n"),
    tokenizer={"special": (*CHAT_TOKENS, "<image>")},
    text={"model_type": "llama"},
    config={
        "vision_config": vision_config(
            model_type="clip_vision_model", image_size=SIDE, patch_size=14, projection_dim=64
        ),
        "image_seq_length": 16,
    },
    ids={"image_token_index": "<image>"},
    finish=rename(RELEASED_TOWER),
)

IDEFICS_SIDE = {"longest_edge": 64}
IDEFICS_SIZES = {"size": {"longest_edge": 128}, "max_image_size": IDEFICS_SIDE}


def idefics3_processor(tokenizer: Qwen2Tokenizer) -> ProcessorMixin:
    return hf.Idefics3Processor(hf.Idefics3ImageProcessor(**IDEFICS_SIZES), tokenizer, image_seq_len=TOKENS_PER_TILE)


def smolvlm_processor(tokenizer: Qwen2Tokenizer) -> ProcessorMixin:
    images = hf.SmolVLMImageProcessor(**IDEFICS_SIZES)
    videos = hf.SmolVLMVideoProcessor(size=IDEFICS_SIDE, max_image_size=IDEFICS_SIDE, num_frames=8, fps=1)
    return hf.SmolVLMProcessor(images, tokenizer, videos, image_seq_len=TOKENS_PER_TILE)


def idefics(model: type[hf.PreTrainedModel], processor: Callable[[Qwen2Tokenizer], ProcessorMixin]) -> TinyModel:
    """An Idefics 3 or SmolVLM of 0.5 M parameters; a tile of 64x64 pixels takes 4 tokens."""
    places = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    named = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
        "video_token": "<video>",
    }
    end = "<end_of_utterance>"
    return TinyModel(
        model=model,
        processor=processor,
        template=chat_template(image="<image>", video="<video>", end=end),
        tokenizer={"special": ("<|endoftext|>", "<|im_start|>", end, *places), "named": named, "eos": end},
        text={"model_type": "llama"},
        config={"vision_config": vision_config(image_size=64, patch_size=16), "scale_factor": 2},
        ids={"image_token_id": "<image>", "pad_token_id": "<|endoftext|>"},
    )


GLM4V_IDS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
}
GLM4V_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", *GLM4V_IDS.values())

GLM4V = TinyModel(
    model=hf.Glm4vForConditionalGeneration,
    processor=lambda tokenizer: hf.Glm4vProcessor(
        hf.Glm4vImageProcessor(**patches(28)), tokenizer, hf.Glm4vVideoProcessor(**patches(28))
    ),
    template=template_of("glm4v"),
    tokenizer={"special": GLM4V_TOKENS, "eos": "<|endoftext|>"},
    # Engines leave the biases of attention out, without an error, where the config does not have this.
    text={"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}, "attention_bias": True},
    config={"vision_config": patch_tower(image_size=SIDE)},
    ids=GLM4V_IDS,
)

TIED = {"tie_word_embeddings": True}

# Embeddings are tied, as in every released Gemma 3.
GEMMA3 = TinyModel(
    model=hf.Gemma3ForConditionalGeneration,
    processor=lambda tokenizer: hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(**TILES), tokenizer, image_seq_length=TOKENS_PER_TILE
    ),
    template=template_of("gemma3"),
    tokenizer={
        "special": ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "named": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "eos": "<end_of_turn>",
        "pad": "<pad>",
        "bos": "<bos>",
        "added": ("\n\n\n\n", "\n\n\n", "\n\n", "\n"),  # as released: blank lines around an image are one token
    },
    text={
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    text_names_tie=False,
    config={
        "vision_config": vision_config(image_size=SIDE, patch_size=14, vision_use_head=False),
        "mm_tokens_per_image": TOKENS_PER_TILE,
        "initializer_range": INITIALIZER_RANGE,
        **TIED,
    },
    ids={
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "image_token_index": "<image_soft_token>",
    },
    drawn="mm_input_projection_weight",
    finish=rename(RELEASED_TOWER),
)

MEL_BINS, WINDOW_S = 32, 30  # engines insist on the window
QWEN_AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"


def audio_tower(**own: Any) -> dict[str, Any]:
    """A Whisper encoder of two layers; a second of audio takes 25 tokens."""
    return {
        "num_mel_bins": MEL_BINS,
        "encoder_layers": 2,
        "max_source_positions": 50 * WINDOW_S,
        "initializer_range": INITIALIZER_RANGE,
    } | own


QWEN2_AUDIO = TinyModel(
    model=hf.Qwen2AudioForConditionalGeneration,
    processor=lambda tokenizer: hf.Qwen2AudioProcessor(
        hf.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=WINDOW_S), tokenizer
    ),
    template=audio_template(audio=QWEN_AUDIO),
    tokenizer={"special": (*CHAT_TOKENS, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")},
    text={"model_type": "qwen2"},
    config={
        "audio_config": audio_tower(
            model_type="qwen2_audio_encoder",
            encoder_attention_heads=1,  # windows of 1,500 states are long for a model this small
            encoder_ffn_dim=64,
            d_model=32,
        )
    },
    ids={"audio_token_index": "<|AUDIO|>"},
    finish=rename({"language_model.model.model.": "language_model.model."}),
)


def omni_processor(tokenizer: Qwen2Tokenizer) -> ProcessorMixin:
    return hf.Qwen2_5OmniProcessor(
        hf.Qwen2VLImageProcessor(**patches(28)),
        hf.Qwen2VLVideoProcessor(**FRAMES, cap_pixels_per_frame=True, **patches(28)),
        hf.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=WINDOW_S, return_attention_mask=True),
        tokenizer,
    )


def wrap_thinker(folder: Path, config: PretrainedConfig) -> None:
    """Writes the thinker as a part of the whole model. A released checkpoint also holds a talker, this one does not."""
    thinker = {name: value for name, value in config.to_dict().items() if name not in ("architectures", "dtype")}
    whole = hf.Qwen2_5OmniConfig(  # type: ignore[call-arg]  # it takes the arguments of every configuration
        thinker_config=thinker,
        enable_audio_output=False,
        tie_word_embeddings=config.tie_word_embeddings,
        dtype="float32",
    )
    whole.architectures = ["Qwen2_5OmniForConditionalGeneration"]
    whole.save_pretrained(folder)
    rename({"": "thinker."})(folder, config)


QWEN2_5_OMNI = TinyModel(
    model=hf.Qwen2_5OmniThinkerForConditionalGeneration,
    processor=omni_processor,
    template=audio_template(
        audio=QWEN_AUDIO, image="<|vision_bos|><|IMAGE|><|vision_eos|>", video="<|vision_bos|><|VIDEO|><|vision_eos|>"
    ),
    tokenizer={
        "special": CHAT_TOKENS,
        "named": {
            "image_token": "<|IMAGE|>",
            "audio_token": "<|AUDIO|>",
            "video_token": "<|VIDEO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
    },
    text={"rope_parameters": ROPE},
    config={
        "audio_config": audio_tower(
            encoder_attention_heads=2, encoder_ffn_dim=128, d_model=64, n_window=50, output_dim=HIDDEN_SIZE
        ),
        "vision_config": WINDOWED_TOWER,
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "initializer_range": INITIALIZER_RANGE,
    },
    ids={
        "pad_token_id": "<|endoftext|>",
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "audio_token_index": "<|AUDIO|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
    },
    finish=wrap_thinker,
)

TEXT_MODELS = {
    "qwen3": TinyModel(model=hf.Qwen3ForCausalLM, text={"head_dim": 32}),
    "qwen2.5": TinyModel(model=hf.Qwen2ForCausalLM),
    "llama": TinyModel(model=hf.LlamaForCausalLM),
}

TINY = {
    "qwen2-vl": QWEN2_VL,
    "qwen2.5-vl": QWEN2_5_VL,
    "qwen3-vl": QWEN3_VL,
    "qwen3.5": QWEN3_5,
    "qwen3-vl-moe": QWEN3_VL_MOE,
    "internvl3": internvl(model_type="qwen2"),
    "internvl3.5": internvl(model_type="qwen3", head_dim=32),
    "llava-onevision": LLAVA_ONEVISION,
    "idefics3": idefics(hf.Idefics3ForConditionalGeneration, idefics3_processor),
    "smolvlm": idefics(hf.SmolVLMForConditionalGeneration, smolvlm_processor),
    "glm4v": GLM4V,
    "gemma3": GEMMA3,
    "llava": LLAVA,
    "qwen2-audio": QWEN2_AUDIO,
    "qwen2.5-omni": QWEN2_5_OMNI,
    **TEXT_MODELS,
}
"""`policy.tiny` -> the model."""

# The shape of Qwen2.5-0.5B with the vocabulary of the tiny tokenizer: 0.36 billion parameters, for measurements.
SMALL_TEXT = TinyModel(
    model=hf.Qwen2ForCausalLM,
    text={
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        **TIED,
    },
)

write_tiny_qwen2_5_vl = TINY["qwen2.5-vl"]


def write_checked(folder: Path) -> Path:
    """Write the model of a machine check: with images, or of text where transformers cannot train with images."""
    return write_tiny("qwen2.5-vl" if takes_encoded_images(hf.Qwen2_5_VLModel) else "qwen2.5", folder)


def write_tiny(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    if name not in TINY:
        raise ValueError(f"there is no tiny model {name!r}: choose {', '.join(TINY)}")
    hf.utils.logging.disable_progress_bar()  # of one file
    return TINY[name](folder, seed=seed, tie_word_embeddings=tie_word_embeddings)
