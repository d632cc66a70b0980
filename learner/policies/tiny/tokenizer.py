"""Tokenizers of tiny models: bytes, a few words, and the special tokens of the family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

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
    pad = lambda name: f"<|vision_start|><|{name}_pad|><|vision_end|>"  # noqa: E731
    return VISION_TEMPLATE.replace(pad("image"), image).replace(pad("video"), video).replace("<|im_end|>", end)


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
    vocab, merges = _byte_level_bpe(WORDS)
    tokens = list(dict.fromkeys([*special, *named.values()]))
    tokenizer = Qwen2Tokenizer(
        vocab=vocab | {token: len(vocab) + i for i, token in enumerate(tokens)},
        merges=merges,
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=tokens,
        model_max_length=MAX_POSITIONS,
        **({"bos_token": bos} if bos else {}),
        **({"model_specific_special_tokens": named} if named else {}),
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


def media_token_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    """The ids by which forward() finds the pictures and videos in a row of tokens."""
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()}
