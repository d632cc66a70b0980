"""Strict JSON out of a response: a value as it was written, or the reason why it is none; nothing is raised."""

from __future__ import annotations

import json
from typing import Any


class _NotStrictError(ValueError):
    """Something that Python's parser would take and the standard (RFC 8259), or good sense, does not."""


def read_json(text: str, *, fenced: bool) -> tuple[Any, str]:
    r"""The value and "", or None and what is wrong with the text.

    Numbers come as their text, so `1.10`, `1e999` and 5,000 digits stay what they are. NaN and infinities are no JSON,
    and an object with a name twice has no one value. With `fenced`, the text may have one fenced code block, which is
    then all that counts.
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
    """The text of one field of an object and "", or "" and why it has none: a text or a number, as it was written."""
    if not isinstance(value, dict):
        return "", f"not a JSON object: {type_name(value)}"
    if name not in value:
        return "", f"no field {name!r}"
    found = value[name]
    if isinstance(found, bool):
        return str(found).lower(), ""
    return (found, "") if isinstance(found, str) else ("", f"field {name!r} is {type_name(found)}")


def type_name(value: Any) -> str:
    """JSON's name for the type of a value that `read_json` returned."""
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
