"""A GLM-4.1V of random weights."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
)

from mobula.learner.policies.tiny.tokenizer import INITIALIZER_RANGE, build_tokenizer, token_id
from mobula.learner.policies.tiny.writing import HIDDEN_SIZE, decoder_config, write_checkpoint

PIXELS_PER_TOKEN = 28 * 28
MAX_IMAGE_TOKENS = 64
MEDIA = ("begin_of_image", "end_of_image", "begin_of_video", "end_of_video", "image", "video")
TEMPLATE = """\
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
        chat_template=TEMPLATE,
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
