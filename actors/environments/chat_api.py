"""Converts OpenAI's chat completions to and from our messages, for programs that call the policy."""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from mobula.actors.environments.base import IMAGE_MARK, Message, marked_message

DATA_URL = "data:"


def message_of(role: str, content: Any) -> Message:
    """Parses a message; images are parts of type image_url with a data: URL.

    Raises:
        ValueError: a part has an unknown type, or an image is no data: URL.
    """
    if content is None or isinstance(content, str):
        return Message(role, content or "")
    if not isinstance(content, Sequence):
        raise ValueError(f"a message's content is {type(content).__name__}: send text, or a list of parts")
    parts = [_part(part) for part in content]
    return marked_message(role, "".join(text for text, _ in parts), [p for _, own in parts for p in own])


def answer_of(model: str, text: str, *, is_cut: bool) -> dict[str, Any]:
    """Builds a chat completion; `is_cut`: a token limit ended it."""
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "length" if is_cut else "stop",
            }
        ],
    }


def events_of(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields a finished completion as server-sent events of `stream`, with the whole text in one event."""
    [choice] = answer["choices"]
    common = {**{k: answer[k] for k in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    more = {k: v for k, v in answer.items() if k not in (*common, "choices", "usage")}
    head = {"index": 0, "delta": choice["message"], "finish_reason": None}
    head |= {k: v for k, v in choice.items() if k not in (*head, "message")}
    tail = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [{**common, **more, "choices": [head]}, {**common, "choices": [tail]}]
    if "usage" in answer:
        chunks.append({**common, "choices": [], "usage": answer["usage"]})
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def _part(part: Any) -> tuple[str, Sequence[bytes]]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return str(part.get("text", "")), ()
    if kind != "image_url":
        raise ValueError(f"a part of type {kind!r} is not known: use text or image_url")
    url = part.get("image_url")
    url = str(url.get("url", "")) if isinstance(url, Mapping) else str(url)
    head, comma, content = url.partition(",")
    if not comma or not head.startswith(DATA_URL) or not head.endswith(";base64"):
        raise ValueError(f"an image is at {url[:60]!r}: send data:image/png;base64,..., nothing is fetched")
    try:
        return IMAGE_MARK, (base64.b64decode(content, validate=True),)
    except binascii.Error as error:
        raise ValueError(f"an image is no base64 ({error})") from error
