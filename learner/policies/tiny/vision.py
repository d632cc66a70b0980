"""Tiny models of the other vision families, and of text families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import (
    CLIPImageProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    GotOcr2ImageProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from mobula.learner.policies.tiny.writing import (
    HIDDEN_SIZE,
    INITIALIZER_RANGE,
    VISION_TEMPLATE,
    build_tokenizer,
    chat_template,
    decoder_config,
    token_id,
    vision_config,
    write_checkpoint,
)

SIDE = 56


TOKENS_PER_IMAGE = 4


GEMMA3_TEMPLATE = """\
{{- '<bos>' -}}
{%- for message in messages -%}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- '<start_of_image>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""


def write_tiny_gemma3(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.5 M parameters into `folder`; embeddings are tied, as in every released one, whatever
    `tie_word_embeddings` says."""
    special = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = build_tokenizer(special, named, eos="<end_of_turn>", pad="<pad>", bos="<bos>")
    # As in the released tokenizer: blank lines around an image are one token.
    lines = [AddedToken("\n" * n, special=False, normalized=False) for n in (4, 3, 2, 1)]
    tokenizer.add_tokens(lines)
    tokenizer.chat_template = GEMMA3_TEMPLATE
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        image_seq_length=TOKENS_PER_IMAGE,
        chat_template=GEMMA3_TEMPLATE,
    )
    ids = {name: token_id(tokenizer, token) for name, token in named.items()}
    text = decoder_config(
        tokenizer,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=tokenizer.bos_token_id,
    )
    config = Gemma3Config(
        text_config=text,
        vision_config=vision_config(image_size=SIDE, patch_size=14, vision_use_head=False),
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
        initializer_range=text["initializer_range"],
        dtype="float32",
    )
    return write_checkpoint(
        folder,
        Gemma3ForConditionalGeneration,
        config,
        processor,
        seed=seed,
        drawn="mm_input_projection_weight",
        renamed={"vision_tower.": "vision_tower.vision_model."},
    )


PIXELS_PER_TOKEN = 28 * 28


MAX_IMAGE_TOKENS = 64


MEDIA = ("begin_of_image", "end_of_image", "begin_of_video", "end_of_video", "image", "video")


GLM4V_TEMPLATE = """\
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|begin_of_video|><|video|><|end_of_video|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


def write_tiny_glm4v(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.6 M parameters into `folder`; an image takes one token for each 28x28 pixels."""
    special = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
    tokenizer = build_tokenizer((*special, *(f"<|{name}|>" for name in MEDIA)), eos="<|endoftext|>")
    size = {"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN}
    patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    processor = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(size=size, **patches),
        tokenizer=tokenizer,
        video_processor=Glm4vVideoProcessor(size=size, **patches),
        chat_template=GLM4V_TEMPLATE,
    )
    ids = {name: token_id(tokenizer, f"<|{name}|>") for name in MEDIA}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6], "partial_rotary_factor": 1.0}
    config = Glm4vConfig(
        # Engines leave the biases of attention out, without an error, where the config does not have this.
        text_config=decoder_config(
            tokenizer, rope_parameters=rope, attention_bias=True, tie_word_embeddings=tie_word_embeddings
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "out_hidden_size": HIDDEN_SIZE,
            "initializer_range": INITIALIZER_RANGE,
        },
        image_token_id=ids["image"],
        video_token_id=ids["video"],
        image_start_token_id=ids["begin_of_image"],
        image_end_token_id=ids["end_of_image"],
        video_start_token_id=ids["begin_of_video"],
        video_end_token_id=ids["end_of_video"],
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(folder, Glm4vForConditionalGeneration, config, processor, seed=seed)


IDEFICS_TILE = 64


IDEFICS_TOKENS_PER_TILE = 4


MAX_ROWS = 6


IDEFICS_ARCHITECTURES = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
}


def write_tiny_idefics(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write the model `name` of 0.5 M parameters into `folder`; a tile of 64x64 pixels takes 4 tokens."""
    named = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
        "video_token": "<video>",
    }
    places = [f"<row_{i}_col_{j}>" for i in range(1, MAX_ROWS + 1) for j in range(1, MAX_ROWS + 1)]
    special = ("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", *places)
    tokenizer = build_tokenizer(special, named, eos="<end_of_utterance>")
    config_class, model_class = IDEFICS_ARCHITECTURES[name]
    config = config_class(
        vision_config=vision_config(image_size=IDEFICS_TILE, patch_size=16),
        text_config=decoder_config(tokenizer, model_type="llama", tie_word_embeddings=tie_word_embeddings),
        image_token_id=token_id(tokenizer, "<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(folder, model_class, config, _processor(name, tokenizer), seed=seed)


def _processor(name: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    side = {"longest_edge": IDEFICS_TILE}
    sizes = {"size": {"longest_edge": 2 * IDEFICS_TILE}, "max_image_size": side}
    template = chat_template(image="<image>", video="<video>", end="<end_of_utterance>")
    if name == "idefics3":
        images = Idefics3ImageProcessor(**sizes)
        return Idefics3Processor(images, tokenizer, image_seq_len=IDEFICS_TOKENS_PER_TILE, chat_template=template)
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(size=side, max_image_size=side, num_frames=8, fps=1),
        image_seq_len=IDEFICS_TOKENS_PER_TILE,
        chat_template=template,
    )


INTERNVL_TILE = 56


INTERNVL_TOKENS_PER_TILE = 4


MAX_TILES = 4


DECODERS: dict[str, dict[str, Any]] = {
    "internvl3": {"model_type": "qwen2"},
    "internvl3.5": {"model_type": "qwen3", "head_dim": 32},
}


def write_tiny_internvl(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write the version `name` of 0.5 M parameters into `folder`; a tile of 56x56 pixels takes 4 tokens."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = build_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), named)
    size = {"size": {"height": INTERNVL_TILE, "width": INTERNVL_TILE}}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(crop_to_patches=True, min_patches=1, max_patches=MAX_TILES, **size),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(**size),
        image_seq_length=INTERNVL_TOKENS_PER_TILE,
        chat_template=chat_template(image="<IMG_CONTEXT>\\n", video="<video>\\n"),
    )
    config = InternVLConfig(
        vision_config=vision_config(
            attention_bias=True, image_size=[INTERNVL_TILE, INTERNVL_TILE], patch_size=[14, 14]
        ),
        text_config=decoder_config(tokenizer, tie_word_embeddings=tie_word_embeddings, **DECODERS[name]),
        image_token_id=token_id(tokenizer, "<IMG_CONTEXT>"),
        image_seq_length=INTERNVL_TOKENS_PER_TILE,
        downsample_ratio=0.5,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(folder, InternVLForConditionalGeneration, config, processor, seed=seed)


PATCH_SIZE = 14


def write_tiny_llava(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.5 M parameters into `folder`; every image takes 16 tokens."""
    tokenizer = build_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"))
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(image="<image>\\n"),
    )
    config = LlavaConfig(
        vision_config=vision_config(
            model_type="clip_vision_model", image_size=SIDE, patch_size=PATCH_SIZE, projection_dim=64
        ),
        text_config=decoder_config(tokenizer, model_type="llama", tie_word_embeddings=tie_word_embeddings),
        image_token_index=token_id(tokenizer, "<image>"),
        image_seq_length=(SIDE // PATCH_SIZE) ** 2,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(
        folder,
        LlavaForConditionalGeneration,
        config,
        processor,
        seed=seed,
        renamed={"vision_tower.": "vision_tower.vision_model."},
    )


LLAVA_ONEVISION_TILE = 56


LLAVA_ONEVISION_TOKENS_PER_TILE = 16


PINPOINTS = [[LLAVA_ONEVISION_TILE * i, LLAVA_ONEVISION_TILE * j] for i in (1, 2) for j in (1, 2)]


def write_tiny_llava_onevision(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write a checkpoint of 0.5 M parameters into `folder`; an image takes at least two tiles of 16 tokens."""
    tokenizer = build_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"))
    size = {"size": {"height": LLAVA_ONEVISION_TILE, "width": LLAVA_ONEVISION_TILE}}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=PINPOINTS, **size),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(**size),
        num_image_tokens=LLAVA_ONEVISION_TOKENS_PER_TILE,
        vision_feature_select_strategy="full",
        chat_template=chat_template(image="<image>\\n", video="<video>\\n"),
    )
    config = LlavaOnevisionConfig(
        vision_config=vision_config(
            model_type="siglip_vision_model", image_size=LLAVA_ONEVISION_TILE, patch_size=14, vision_use_head=False
        ),
        text_config=decoder_config(tokenizer, model_type="qwen2", tie_word_embeddings=tie_word_embeddings),
        image_token_index=token_id(tokenizer, "<image>"),
        video_token_index=token_id(tokenizer, "<video>"),
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    return write_checkpoint(
        folder,
        LlavaOnevisionForConditionalGeneration,
        config,
        processor,
        seed=seed,
        renamed={"vision_tower.": "vision_tower.vision_model."},
    )


TEXT_ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen2.5": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
}


# The shape of Qwen2.5-0.5B, with the vocabulary of the tiny tokenizer.
SMALL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def write_tiny_text(name: str, folder: Path, *, seed: int = 0, tie_word_embeddings: bool = False) -> Path:
    """Write the architecture `name` into `folder`: 0.35 M parameters, tokenizer and chat template."""
    config, model, own = TEXT_ARCHITECTURES[name]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = VISION_TEMPLATE
    settings = decoder_config(tokenizer, tie_word_embeddings=tie_word_embeddings, dtype="float32", **own)
    return write_checkpoint(folder, model, config(**settings), tokenizer, seed=seed)


def write_small_text(folder: Path, *, seed: int = 0) -> Path:
    """Write a model of random weights and 0.36 billion parameters into `folder`, for measurements."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = VISION_TEMPLATE
    settings = decoder_config(tokenizer, dtype="float32", tie_word_embeddings=True, **SMALL)
    return write_checkpoint(folder, Qwen2ForCausalLM, Qwen2Config(**settings), tokenizer, seed=seed)
