"""Converts rows of recorded responses to requests for reward functions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from mobula.cluster.errors import MobulaError
from mobula.cluster.records.json_lines import parse_json
from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import RewardRequest
from mobula.rewards.offline.images import named_frames, named_images
from mobula.rewards.offline.sources import IMAGE_COLUMNS, Row

_decode = msgspec.json.Decoder().decode
ReadImages = Callable[[Sequence[Any]], tuple[bytes, ...]]


class BrokenRowError(MobulaError):
    """A row is not a valid record; the message names the fault."""


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded response; `images` and `response_images` are names of files, not read yet."""

    id: str | int | None
    text: str
    references: tuple[str, ...]
    metadata: Mapping[str, Any]
    prompt: str
    images: tuple[Any, ...]
    response_images: tuple[Any, ...]

    @property
    def has_token_count(self) -> bool:
        return self.metadata.get("generated_tokens") is not None

    def request(self, read: ReadImages, *, needs_images: bool) -> RewardRequest:
        """Builds the request. Raises `RewardError` if an image cannot be read."""
        num_tokens = int(self.metadata["generated_tokens"]) if self.has_token_count else len(self.text.split())
        drawn = read(self.response_images) if self.response_images else ()
        response = Response(self.text, num_tokens, bool(self.metadata.get("is_truncated", False)), drawn)
        shown = read(self.images) if needs_images and self.images else ()
        return RewardRequest(response, self.references, self.metadata, self.prompt, shown)


def read_row(row: Row) -> Record:
    """Reads a row with `response` and optionally `id`, `prompt`, `reference`, `metadata` and images.

    A number may replace a text, a text a list, chat messages a prompt, and JSON text the metadata.

    Raises:
        BrokenRowError: the row is no JSON object, has no response, or has an invalid value.
    """
    values = _parsed_line(row) if isinstance(row, bytes) else row
    if not isinstance(values, dict):
        raise BrokenRowError(f"a {type(values).__name__}, not an object")
    response = values.get("response")
    if response is None or response != response:
        raise BrokenRowError("it has no response")
    id_ = values.get("id")
    has_images = not values.keys().isdisjoint(IMAGE_COLUMNS)
    return Record(
        id=id_ if id_ is None or type(id_) in (int, str) else str(id_),
        text=_text(response, "response"),
        references=_references(values.get("reference")),
        metadata=_metadata(values),
        prompt=_prompt(values.get("prompt")),
        images=(*named_images(values, "image", "images"), *named_frames(values)) if has_images else (),
        response_images=named_images(values, "response_image", "response_images") if has_images else (),
    )


def _parsed_line(line: bytes) -> Any:
    # msgspec takes the last of equal keys; parse_json refuses them
    if line.count(b'"response"') < 2 and line.count(b'"reference"') < 2:
        try:
            return _decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            pass  # parse_json is slower and accepts more, and its errors name the fault
    try:
        return parse_json(line)
    except ValueError as error:
        raise BrokenRowError(f"no JSON ({error})") from error


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise BrokenRowError(f"{name} is {_kind(value)}, not a text")
    return str(value)


def _references(value: Any) -> tuple[str, ...]:
    """Returns the non-empty references, without surrounding white space."""
    if isinstance(value, str):
        value = value.strip()
        return (value,) if value else ()
    if value is None or value != value:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    texts = (_text(item, "reference").strip() for item in items if item is not None and item == item)
    return tuple(filter(None, texts))


def _metadata(values: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = values.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise BrokenRowError(f"metadata is a text and no JSON ({error})") from error
    if not isinstance(metadata, dict):
        raise BrokenRowError(f"metadata is a {type(metadata).__name__}, not an object")
    for name in ("generated_tokens", "is_truncated"):  # columns of recorded trajectories
        if name in values:
            metadata = {name: values[name], **metadata}
    tokens = metadata.get("generated_tokens")
    if tokens is not None and (not isinstance(tokens, int | float) or not math.isfinite(tokens)):
        raise BrokenRowError(f"generated_tokens is {tokens!r:.40}, no number")
    return metadata


def _prompt(value: Any) -> str:
    """Returns a text, or the joined texts of chat messages."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | tuple) and all(isinstance(message, dict) for message in value):
        contents = [message.get("content") for message in value]
        parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        return "\n".join(text for text in texts if isinstance(text, str))
    return _text(value, "prompt")


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    return f"{value}".lower() if isinstance(value, bool) else f"a {type(value).__name__}"
