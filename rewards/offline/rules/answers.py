"""The answer inside a response: JSON is read once for all rules, and its answer field taken out."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec

_STARTS = frozenset('{["-0123456789tfnNI \t\r\n')  # of any text that Python reads as JSON
_FENCE = "```"
ANSWER_FIELD = "answer"
_decode = msgspec.json.Decoder().decode


class Answer(msgspec.Struct, gc=False):
    """The answer of a response.

    `text` is what is held against the references: the answer field of a JSON object, else the last `\\boxed{}`, else
    the whole response; None is an object that names no answer. Python's reader also takes NaN and infinities for JSON,
    the standard does not.
    """

    text: str | None
    is_object: bool
    is_lenient_json: bool  # as Python's json module sees it


def read_answer(response: str) -> Answer:
    """Read a response, whatever is in it; nothing is raised."""
    if response[:1] not in _STARTS:
        if response.startswith(_FENCE):
            return _fenced(response)
        return Answer(_boxed(response), False, False)
    try:
        value = _decode(response)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _slowly(response)
    return _answer(response, value)


def _answer(response: str, value: Any) -> Answer:
    if not isinstance(value, dict):
        return Answer(response if isinstance(value, list) else _text(value), False, True)
    if ANSWER_FIELD in value:
        return Answer(_text(value[ANSWER_FIELD]), True, True)
    return Answer(_text(next(iter(value.values()))) if len(value) == 1 else None, True, True)


def _slowly(response: str) -> Answer:
    """The standard library accepts some more: single surrogates, numbers beyond the range of a float, NaN."""
    is_lenient, is_strict, value = False, False, None
    try:
        json.loads(response)
        is_lenient = True
        value = json.loads(response, parse_constant=_refuse)
        is_strict = True
    except (ValueError, RecursionError):  # too long a number is a plain ValueError
        pass
    return _answer(response, value) if is_strict else Answer(_boxed(response), False, is_lenient)


def _fenced(response: str) -> Answer:
    """The answer inside a code fence, which keeps the response from being JSON as it stands."""
    body = response.strip().removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json")
    inner = read_answer(body.strip()) if not body.strip().startswith(_FENCE) else None
    return Answer(inner.text if inner and inner.is_object else _boxed(response), False, False)


def _boxed(response: str) -> str:
    if "\\boxed" not in response:
        return response
    from mobula.rewards.functions.parsing.latex_boxes import (
        last_boxed,  # its package is needed where a response has a box alone
    )

    content = last_boxed(response)
    return response if content is None else content


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return None if isinstance(value, dict | list) else json.dumps(value)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
