"""The record that is scored offline: prompt, response, references and what is known of both; one JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from mobula.cluster.records.json_lines import parse_json
from mobula.rewards.offline.sources.pictures import PROMPT_KEYS, RESPONSE_KEYS, named_frames, named_pictures

MAX_NAMED_LINES = 20


class BrokenRecordError(ValueError):
    """A line or row that is no record; the message names what is wrong with it."""


class Metadata(msgspec.Struct, gc=False):
    """The fields of a record beside its texts. None is "not stated", an empty list "none at all"."""

    evidence_entities: list[str] | None = None
    claimed_entities: list[str] | None = None
    latency_ms: float = 0.0
    generated_tokens: int | None = None


class Everything(msgspec.Struct, gc=False):
    """All of a record: the whole of its metadata, and the pictures of prompt and response as it names them.

    Pictures are `mobula.rewards.offline.sources.pictures.Named`, a union that msgspec has no decoder for.
    """

    metadata: Mapping[str, Any]
    pictures: tuple[Any, ...] = ()
    response_pictures: tuple[Any, ...] = ()


class Record(msgspec.Struct, gc=False):
    """One response with all that it is held against. `metadata` holds the known keys, `everything` all of them.

    `everything` is there only where a recipe's functions are to read it.
    """

    response: str
    id: str | int | None = None
    prompt: str = ""
    reference: str | list[str] | None = None
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    everything: Everything | None = None

    @property
    def references(self) -> tuple[str, ...]:
        """The references that say something, without white space around them."""
        reference = self.reference
        if reference is None:
            return ()
        if reference.__class__ is str:
            text = reference.strip()
            return (text,) if text else ()
        return tuple(filter(None, map(str.strip, reference)))


_decode = msgspec.json.Decoder(Record).decode


def from_line(line: bytes) -> Record:
    """The record of one line of JSON.

    Raises:
        BrokenRecordError: it is no JSON object, or lacks a response.
    """
    if not may_repeat_a_key(line):
        try:
            record = _decode(line)
            if record.everything is None:
                return record
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            pass  # read again by the standard library, which is slow, lenient and names what is wrong
    try:
        values = parse_json(line)
    except ValueError as error:
        raise BrokenRecordError(f"no JSON ({error})") from error
    return from_values(values)


def may_repeat_a_key(line: bytes) -> bool:
    """Whether `response` or `reference` may stand twice in a line, of which msgspec would take the last one."""
    return line.count(b'"response"') > 1 or line.count(b'"reference"') > 1


def from_values(values: Any) -> Record:
    """The record of a mapping whose types need not be exact: numbers may stand where texts are asked for.

    Raises:
        BrokenRecordError: it is no mapping, lacks a response, or a value is of no use.
    """
    if not isinstance(values, Mapping):
        raise BrokenRecordError(f"a {type(values).__name__}, not an object")
    values = {key: value for key, value in values.items() if not _is_missing(value)}
    if values.get("response") is None:
        raise BrokenRecordError("it has no response")
    if not _says_text(values["response"]):
        raise BrokenRecordError(f"response is {_kind(values['response'])}, not a text")
    metadata = values.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = parsed(metadata)
    if not isinstance(metadata, Mapping):
        raise BrokenRecordError(f"metadata is a {type(metadata).__name__}, not an object")
    return Record(
        response=str(values["response"]),
        id=_id(values.get("id")),
        prompt=_prompt(values.get("prompt")),
        reference=_texts(values.get("reference"), "reference"),
        metadata=_metadata(metadata),
    )


def with_everything(record: Record, values: Mapping[str, Any]) -> Record:
    """The same record with all its fields, for functions that read keys of their own and pictures."""
    metadata = values.get("metadata") or {}
    record.everything = Everything(
        parsed(metadata) if isinstance(metadata, str) else metadata,
        (*named_pictures(values, PROMPT_KEYS), *named_frames(values)),
        named_pictures(values, RESPONSE_KEYS),
    )
    return record


def _metadata(values: Mapping[str, Any]) -> Metadata:
    tokens = _number(values, "generated_tokens")
    return Metadata(
        evidence_entities=_texts(values.get("evidence_entities"), "evidence_entities"),
        claimed_entities=_texts(values.get("claimed_entities"), "claimed_entities"),
        latency_ms=_number(values, "latency_ms") or 0.0,
        generated_tokens=None if tokens is None else int(tokens),
    )


def _id(value: Any) -> str | int | None:
    return value if value is None or (isinstance(value, int) and not isinstance(value, bool)) else str(value)


def _texts(value: Any, name: str) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        items = [item for item in value if not _is_missing(item)]
        unfit = next((item for item in items if not _says_text(item)), None)
        if unfit is not None:
            raise BrokenRecordError(f"{name} has {_kind(unfit)}, not a text")
        return list(map(str, items))
    if not _says_text(value):
        raise BrokenRecordError(f"{name} is {_kind(value)}, neither a text nor a list of texts")
    return [str(value)]


def _is_missing(value: Any) -> bool:
    """Whether a value is null, or NaN, which pandas writes for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _says_text(value: Any) -> bool:
    """Whether a value is a text or a number; of anything else, Python's way to write it is not an answer."""
    return isinstance(value, str | int | float | Decimal) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    return f"{value}".lower() if isinstance(value, bool) else f"a {type(value).__name__}"


def _prompt(value: Any) -> str:
    """A text, or chat messages, whose texts follow each other."""
    if value is None or _says_text(value):
        return "" if value is None else str(value)
    if isinstance(value, list | tuple) and all(isinstance(message, Mapping) for message in value):
        return "\n".join(text for message in value for text in _said(message.get("content")))
    raise BrokenRecordError(f"prompt is {_kind(value)}, neither a text nor a list of chat messages")


def _said(content: Any) -> list[str]:
    """The texts of one chat message, whose content is a text or a list of parts; pictures among them say nothing."""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _number(values: Mapping[str, Any], name: str) -> float | None:
    if values.get(name) is None:
        return None
    try:
        number = float(values[name])
    except (TypeError, ValueError, OverflowError) as error:
        raise BrokenRecordError(f"metadata.{name} is {values[name]!r:.40}, no number") from error
    if not math.isfinite(number):
        raise BrokenRecordError(f"metadata.{name} is {number}, not finite")
    return number


def parsed(text: str) -> Any:
    """Metadata out of its text.

    Raises:
        BrokenRecordError: it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenRecordError(f"metadata is a text and no JSON ({error})") from error
