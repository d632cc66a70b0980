"""Reads strict JSON from a response: returns the value, or the reason of a failure; raises nothing."""

from __future__ import annotations

import json
from typing import Any


class _NotStrictError(ValueError):
    """Python's parser would accept the text, the standard (RFC 8259) does not."""


def read_json(text: str, *, fenced: bool) -> tuple[Any, str]:
    r"""Returns (value, ""), or (None, reason).

    Numbers are returned as text, so `1.10`, `1e999` and 5,000 digits are unchanged. NaN, infinities and repeated names
    in an object are refused. With `fenced`, the text may have one fenced code block; then only the block is read.
    """
    if fenced and "```" in text:
        if text.count("```") != 2:
            return None, f"{text.count('```')} code fences instead of a pair"
        label, _, text = text.split("```")[1].partition("\n")
        if label.strip() not in ("", "json"):
            return None, "a code block of another kind than JSON"
    try:
        return _DECODER.decode(text), ""
    except _NotStrictError as error:
        return None, f"not strict JSON: {error}"
    except ValueError as error:
        return None, f"not JSON: {error.args[0] if error.args else error}"
    except RecursionError:
        return None, "not JSON that can be read: nested too deep"


def field_text(value: Any, name: str) -> tuple[str, str]:
    """Returns (text or number of a field as written, ""), or ("", reason)."""
    if not isinstance(value, dict):
        return "", f"not a JSON object: {type_name(value)}"
    if name not in value:
        return "", f"no field {name!r}"
    field = value[name]
    if isinstance(field, bool):
        return str(field).lower(), ""
    return (field, "") if isinstance(field, str) else ("", f"field {name!r} is {type_name(field)}")


def type_name(value: Any) -> str:
    """Returns the JSON name for the type of a value from `read_json`."""
    names = {dict: "an object", list: "an array", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a text or number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _NotStrictError("a name comes twice")
    return members


def _refuse_constant(name: str) -> Any:
    raise _NotStrictError(f"{name} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
