"""Tokenizer, template and files that all tiny models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2Tokenizer,
)

MAX_POSITIONS = 4096


# About 1/sqrt(width). The usual 0.02 suits widths of thousands; at this width it leaves every block next to silent, and
# learning starts several times slower.
INITIALIZER_RANGE = 0.08


SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


# The pre-tokenizer would part "\boxed" from "{", so the opening of an answer is an added token; it is not special, and
# decoding therefore keeps it.
ANSWER_OPENING = r"\boxed{"


# One token each, which keeps prompts short; all other text falls back to single bytes.
WORDS = (
    "user", "assistant", "system",
    "Which", "What", " digit", " digits", " is", " this", " the", " sum", " of", " in", " are", " these",
    " Answer", " answer",
)  # fmt: skip


VISION_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or part['type'] == 'image_url' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def chat_template(*, image: str, video: str = "", end: str = "<|im_end|>") -> str:
    """`VISION_TEMPLATE` with the placeholders of another family, and the token that ends a turn."""
    text = VISION_TEMPLATE.replace("<|im_end|>", end)
    for name, placeholder in (("image", image), ("video", video)):
        text = text.replace(f"<|vision_start|><|{name}_pad|><|vision_end|>", placeholder)
    return text


def audio_template(*, audio: str, image: str = "", video: str = "") -> str:
    """`chat_template` with the placeholder of sounds beside the others."""
    part = "{%- elif part['type'] == 'audio' -%}\n{{- '" + audio + "' -}}\n"
    text = "{%- elif part['type'] == 'text' -%}\n"
    return chat_template(image=image, video=video).replace(text, part + text)


def build_tokenizer(
    special: Sequence[str] = SPECIAL_TOKENS,
    named: Mapping[str, str] | None = None,
    *,
    eos: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
    bos: str | None = None,
) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer: any text round-trips, once brought to Unicode's NFC.

    Ids: the 256 bytes, the merges of `WORDS`, `special` and then `named` (attribute of the tokenizer -> token) in
    order, `ANSWER_OPENING`. Each digit is one.
    """
    named = dict(named or {})
    options: dict[str, Any] = {"bos_token": bos} if bos else {}
    if named:
        options["model_specific_special_tokens"] = named
    vocab, merges = _byte_level_bpe(WORDS)
    tokens = list(dict.fromkeys([*special, *named.values()]))
    tokenizer = Qwen2Tokenizer(
        vocab=vocab | {token: len(vocab) + i for i, token in enumerate(tokens)},
        merges=merges,  # type: ignore[arg-type]  # declared as strings, read as pairs
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=tokens,
        model_max_length=MAX_POSITIONS,
        **options,
    )
    tokenizer.add_tokens([AddedToken(ANSWER_OPENING, special=False, normalized=False)])
    return tokenizer


def _byte_level_bpe(words: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges under which each of `words` is one token.

    A word is first split by the merges of the words before it and its pieces are then joined from the left, so that a
    later word never breaks an earlier one: its merges rank lower.
    """
    vocab = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in words:
        symbols = word.replace(" ", "Ġ")  # byte-level BPE writes a space as Ġ
        left, *rest = (piece.value for piece in BPE(vocab=vocab, merges=merges).tokenize(symbols))
        for right in rest:
            merges.append((left, right))
            left += right
            vocab.setdefault(left, len(vocab))
    return vocab, merges


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """The id of one token."""
    made = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(made, int), "one token has one id"
    return made


class MediaTokenIds(TypedDict):
    """The ids by which forward() of a Qwen finds the images and videos in a row of tokens."""

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int


def media_token_ids(tokenizer: PreTrainedTokenizerBase) -> MediaTokenIds:
    """Those of a tokenizer with `SPECIAL_TOKENS`."""
    return {
        "image_token_id": token_id(tokenizer, "<|image_pad|>"),
        "video_token_id": token_id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": token_id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": token_id(tokenizer, "<|vision_end|>"),
    }


HIDDEN_SIZE = 128


def decoder_config(tokenizer: PreTrainedTokenizerBase, **own: Any) -> dict[str, Any]:
    """Two layers of 128; head_dim is 32, which engines on CPU take."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | own


def vision_config(**own: Any) -> dict[str, Any]:
    """Two layers of 64 and two heads."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": INITIALIZER_RANGE,
    } | own


def write_checkpoint(
    folder: Path,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    *,
    seed: int,
    renamed: Mapping[str, str] | None = None,
    drawn: str = "",
) -> Path:
    """Write float32 weights of this seed, tokenizer and processor into `folder`, and return `folder`.

    `renamed` has beginnings of parameter names as a new model saves them, and what they are in released checkpoints;
    `drawn` is the end of the name of a parameter that a new model has as zeros, so that nothing behind it is seen.
    """
    tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        model.to(device="cpu", dtype=torch.float32)  # type: ignore[call-arg]  # its decorator hides self
        if drawn:
            [zeros] = [parameter for name, parameter in model.named_parameters() if name.endswith(drawn)]
            zeros.data.normal_(std=INITIALIZER_RANGE)
    # Only stop and pad ids: an engine that takes its sampling defaults from this file samples from the plain policy.
    model.generation_config = GenerationConfig(
        eos_token_id=list(dict.fromkeys([tokenizer.eos_token_id, tokenizer.pad_token_id])),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if renamed:
        _rename(folder / "model.safetensors", renamed)
    return folder


def _rename(file: Path, renamed: Mapping[str, str]) -> None:
    state = {}
    for name, tensor in load_file(file).items():
        start = next((start for start in renamed if name.startswith(start)), "")
        state[renamed.get(start, "") + name.removeprefix(start)] = tensor.clone()
    save_file(state, file, metadata={"format": "pt"})
