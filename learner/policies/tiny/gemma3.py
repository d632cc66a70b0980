"""A Gemma 3 with a vision tower, of random weights: sliding and full attention."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3ImageProcessor, Gemma3Processor

from mobula.learner.policies.tiny.tokenizer import build_tokenizer, token_id
from mobula.learner.policies.tiny.writing import decoder_config, vision_config, write_checkpoint

SIDE = 56
TOKENS_PER_IMAGE = 4
TEMPLATE = """\
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
    tokenizer.chat_template = TEMPLATE
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        image_seq_length=TOKENS_PER_IMAGE,
        chat_template=TEMPLATE,
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
