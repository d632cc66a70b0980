"""Special token ids of a checkpoint: ends of a response, padding, and tokens reserved for the chat template."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

_TAG = re.compile(r"</?([A-Za-z][\w-]*)>")
_MARKER = re.compile(r"<.*>|\[.*\]", re.DOTALL)


def end_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a response: of the tokenizer, then of generation_config.json, else of config.json."""
    ids = [tokenizer.eos_token_id, *_listed(_generation_eos(model))]
    if not any(i is not None for i in ids):
        ids = _listed(
            getattr(AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config(), "eos_token_id", None)
        )
    ends = tuple(dict.fromkeys(i for i in ids if i is not None))
    if not ends:
        raise ValueError(
            f"policy.model={model} names no token that ends a response: set eos_token_id in its generation_config.json"
        )
    return ends


def pad_token_id(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> int:
    """The padding id; an end id if the tokenizer has none or pads with a token that is no marker."""
    is_marker = tokenizer.pad_token is not None and _MARKER.fullmatch(tokenizer.pad_token)
    return tokenizer.pad_token_id if is_marker else ends[0]


def decode_response(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int] | np.ndarray, hidden: Collection[int]
) -> str:
    """The text of a response without `hidden` ids (ends, padding, media). Tags that are special tokens stay."""
    ids = [i for i in np.asarray(token_ids).tolist() if i not in hidden]
    return tokenizer.decode(ids, skip_special_tokens=False)  # type: ignore[return-value]  # of one sequence: a str


def reserved_tokens(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], written: Iterable[str]) -> re.Pattern[str]:
    """Builds a pattern of the tokens that a row may not contain: `ids`, markers in the tokenizer's special_tokens_map,
    and special tokens and markers in `written`, texts of the chat template. Pairs of tags such as `<answer>` and
    `</answer>` are text.
    """
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    markers = [name for name, token in added.items() if token.special or _MARKER.fullmatch(name)]
    names = {name for text in written for name in markers if name in text}
    named = (value for value in tokenizer.special_tokens_map.values() if isinstance(value, str))
    names.update(name for name in tokenizer.convert_ids_to_tokens(list(ids)) if name)
    names.update(name for name in named if _MARKER.fullmatch(name))
    names = {name for name in names if not _is_tag(name, added)}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _is_tag(name: str, added: Collection[str]) -> bool:
    """Whether the token is one tag of a pair."""
    match = _TAG.fullmatch(name)
    return match is not None and {f"<{match[1]}>", f"</{match[1]}>"} <= set(added)


def _generation_eos(model: str) -> int | list[int] | None:
    try:
        return GenerationConfig.from_pretrained(model).eos_token_id
    except OSError as error:
        if not (Path(model) / GENERATION_CONFIG_NAME).is_file():  # the file is optional
            return None
        raise ValueError(
            f"policy.model={model} has a {GENERATION_CONFIG_NAME} that cannot be read: download it again, or remove it"
        ) from error


def _listed(ids: int | list[int] | None) -> list[int | None]:
    return list(ids) if isinstance(ids, list) else [ids]
