"""Parses tool calls in a policy's text. Imports the standard library only: the Python of verifiers imports it too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 32  # calls of one turn that are parsed
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")  # models are trained with different names
OTHER_KEYS = ("name", "id", "type")  # id and type are ignored


class CallText(NamedTuple):
    """One call. `status` is `ok` or the kind of error, `detail` the error message."""

    name: str
    arguments: Mapping[str, Any]
    status: str
    detail: str = ""


class _DuplicateKeyError(Exception):
    """An object has a key twice, so the value is ambiguous."""


def read_calls(text: str) -> list[CallText]:
    """Parses the first MAX_CALLS calls in `text`. Never raises. The time is linear in the length of the text. A block
    ends after the JSON value, not at the first closing tag, which may be part of an argument. A block has one call or a
    list of calls."""
    calls: list[CallText] = []
    start = text.find(OPEN)
    while start >= 0 and len(calls) < MAX_CALLS:
        block, end = _block(text, start + len(OPEN))
        calls += block
        start = -1 if end < 0 else text.find(OPEN, end)
    return calls[:MAX_CALLS]


def _block(text: str, begin: int) -> tuple[list[CallText], int]:
    """The calls of the block at `begin`, and the position after it; -1 if the block has no end."""
    problem, value, end = "", None, begin
    start = begin
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
    except _DuplicateKeyError as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem, end = f"no JSON ({error})", begin
    close = text.find(CLOSE, end)
    if close < 0:
        return [CallText("", {}, "unclosed_block", f"{OPEN} has no {CLOSE}")], -1
    if not problem and text[end:close].strip():
        problem = "text behind the JSON value"
    after = close + len(CLOSE)
    if problem.startswith("the key"):
        return [CallText("", {}, "malformed_structure", problem)], after
    if problem:
        return [CallText("", {}, "invalid_json", problem)], after
    values = value if isinstance(value, list) and value else [value]
    return [_call(item) for item in values[:MAX_CALLS]], after


def _call(value: Any) -> CallText:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # OpenAI's tool calls
        value = {**{key: item for key, item in value.items() if key != "function"}, **value["function"]}
    if not isinstance(value, dict):
        return CallText("", {}, "malformed_structure", f"a call is an object, not a {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return CallText("", {}, "missing_name", "`name` is no text")
    unknown = [key for key in value if key not in (*ARGUMENT_KEYS, *OTHER_KEYS)]
    if unknown:
        return CallText(name, {}, "malformed_structure", f"{unknown[0]!r} does not stand in `arguments`")
    given = [value[key] for key in ARGUMENT_KEYS if value.get(key) is not None]
    if len(given) > 1:
        return CallText(name, {}, "malformed_structure", "the arguments stand under two keys")
    arguments = _object(given[0]) if given else {}
    if arguments is None:
        return CallText(name, {}, "malformed_structure", "`arguments` is no object")
    return CallText(name, arguments, "ok")


def _object(value: Any) -> dict[str, Any] | None:
    """Parses arguments, which some models write as JSON in a string; None if they are no object."""
    while isinstance(value, str):  # terminates: each decoded string is shorter
        try:
            value = _DECODER.decode(value)
        except (_DuplicateKeyError, ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _DuplicateKeyError(f"the key {twice!r} stands twice")
    return unique


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
