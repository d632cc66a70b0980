"""Parses chat turns of datasets: text with placeholders, or lists of parts as in OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from mobula.actors.datasets.formats.base import ROLES, text_of
from mobula.actors.datasets.rows import RowError, Turn
from mobula.cluster.records.markup import PART, PLACEHOLDERS, plain, text_part

TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image")
VIDEO_PARTS = ("video", "video_url", "input_video")
AUDIO_PARTS = ("audio", "audio_url", "input_audio")
HELD = ("url", "path", "bytes", "base64", "source")  # keys of a part of any kind
FROM_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "model": "assistant",
    "developer": "system",  # OpenAI's name since 2024
    **{role: role for role in ROLES},
}


def turns_of(messages: Any, column: str) -> tuple[list[Turn], list[Any], list[Any], list[Any]]:
    """Parses messages; returns the turns, and the images, videos and sounds of their parts, in order.

    A turn is `{"role", "content"}` or `{"from", "value"}`; content is a text or a list of parts. A media part without
    a medium is a placeholder for an entry of the row's media column.

    Raises:
        RowError: `messages` has another form.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RowError(f"bad_{column}", f"`{column}` is {_shown(messages)}: write a list of turns")
    turns: list[Turn] = []
    held: dict[str, list[Any]] = {kind: [] for kind in PLACEHOLDERS}
    for message in messages:
        if message is None:  # a list of fixed length is filled with null
            continue
        role, content = _role_and_content(message, column)
        texts = []
        for part in content if isinstance(content, list | tuple) else [content]:
            kind, text, medium = ("text", "", None) if part is None else _part(part, column)
            texts.append(text)
            if medium is not None:
                held[kind].append(medium)
        turns.append(Turn(role, "".join(texts)))
    return turns, held["image"], held["video"], held["audio"]


def medium_of(part: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The medium of a part, under one of `names` or under a key of transformers' templates or Anthropic's API; None if
    the part is only a placeholder.
    """
    held = next((part[key] for key in (*names, *HELD) if part.get(key)), None)
    return {"bytes": held} if held is not None and held is part.get("base64") else held


def response_of(value: Any, column: str) -> str | None:
    """The text of a response, given as text, turn, or list with one turn; None for None."""
    if value is None or value == "":
        return None
    if not isinstance(value, Mapping | list | tuple):
        return text_of(value, column)
    turns, *media = turns_of(value if isinstance(value, list | tuple) else [value], column)
    if len(turns) != 1 or any(media):
        raise RowError(f"bad_{column}", f"`{column}` has {len(turns)} turns: write one response of text")
    return plain(turns[0].text) or None


def split_response(turns: Sequence[Turn], column: str) -> tuple[list[Turn], str | None]:
    """Splits turns into the prompt, which ends with a user turn, and the assistant's final answer, if any."""
    asked = list(turns)
    response = plain(asked.pop().text) if asked and asked[-1].role == "assistant" else None
    if not asked or asked[-1].role != "user":
        raise RowError(f"bad_{column}", f"`{column}` has no user turn to answer: end it in one, or in an answer to one")
    return asked, response


def _role_and_content(message: Any, column: str) -> tuple[str, Any]:
    if not isinstance(message, Mapping):
        raise RowError(f"bad_{column}", f"`{column}` has {_shown(message)} in the place of a turn: write an object")
    name = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    role = FROM_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError(f"bad_{column}", f"`{column}` has a turn of {name!r}: use one of {', '.join(FROM_ROLES)}")
    if message.get("tool_calls") or content is None:
        raise RowError(f"bad_{column}", f"`{column}` has a {role} turn without text: tool calls are not read")
    return role, content


def _part(part: Any, column: str) -> tuple[str, str, Any]:
    """Parses a part; returns the kind, the text (a placeholder for a medium), and the medium, if any."""
    if isinstance(part, str | Real):
        return "text", str(part), None
    if not isinstance(part, Mapping):
        raise RowError(f"bad_{column}", f"`{column}` has {_shown(part)} as content: write a text or a list of parts")
    kind = part.get("type")
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return "text", text_part(part["text"]), None
    if kind in IMAGE_PARTS:
        return "image", PLACEHOLDERS["image"] + PART, medium_of(part, IMAGE_PARTS)
    if kind in VIDEO_PARTS:
        held = medium_of(part, VIDEO_PARTS)
        video = {"video": held, "fps": part.get("fps")} if isinstance(held, list | tuple) else held
        return "video", PLACEHOLDERS["video"] + PART, video
    if kind in AUDIO_PARTS:
        return "audio", PLACEHOLDERS["audio"] + PART, medium_of(part, AUDIO_PARTS)
    raise RowError(f"bad_{column}", f"`{column}` has a part of type {kind!r}: use text, image_url, video or audio")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:60]
