"""Messages of remote environments and of chat programs."""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from mobula.actors.environments.base import (
    IMAGE_MARK,
    Action,
    EnvironmentSpec,
    Message,
    Observation,
    Reset,
    Step,
    Tool,
    marked_message,
)

Json = dict[str, Any]


def observation_to_json(observation: Sequence[Message]) -> list[Json]:
    return [
        {"role": m.role, "text": m.text, "images": [base64.b64encode(p).decode("ascii") for p in m.images]}
        for m in observation
    ]


def observation_from_json(messages: Sequence[Mapping[str, Any]]) -> Observation:
    return tuple(
        Message(str(m["role"]), str(m["text"]), tuple(base64.b64decode(p, validate=True) for p in m["images"]))
        for m in messages
    )


def spec_to_json(spec: EnvironmentSpec) -> Json:
    return {**vars(spec), "tools": [{**vars(tool), "parameters": dict(tool.parameters)} for tool in spec.tools]}


def spec_from_json(given: Mapping[str, Any]) -> EnvironmentSpec:
    tools = tuple(Tool(t["name"], t["description"], t["parameters"]) for t in given["tools"])
    return EnvironmentSpec(
        int(given["max_turns"]), tools, bool(given["is_deterministic"]), demonstrates=bool(given["demonstrates"])
    )


def action_to_json(action: Action) -> Json:
    return {**vars(action), "tool_calls": [{**vars(c), "arguments": dict(c.arguments)} for c in action.tool_calls]}


def reset_to_json(reset: Reset) -> Json:
    return {"observation": observation_to_json(reset.observation), "info": _texts(reset.info)}


def reset_from_json(given: Mapping[str, Any]) -> Reset:
    return Reset(observation_from_json(given["observation"]), given["info"])


def step_to_json(step: Step) -> Json:
    reward = dict(step.reward) if isinstance(step.reward, Mapping) else step.reward
    return {
        "observation": observation_to_json(step.observation),
        "reward": {k: float(v) for k, v in reward.items()} if isinstance(reward, dict) else float(reward),
        "terminated": bool(step.terminated),
        "truncated": bool(step.truncated),
        "info": _texts(step.info),
    }


def step_from_json(given: Mapping[str, Any]) -> Step:
    rest = (given[name] for name in Step._fields[1:])
    return Step(observation_from_json(given["observation"]), *rest)


def _texts(info: Mapping[str, Any]) -> Json:
    """The entries of `info` with JSON types; the client does not read the others."""
    return {str(k): v for k, v in info.items() if isinstance(v, str | bool | int | float) or v is None}


DATA_URL = "data:"


def message_of(role: str, content: Any) -> Message:
    """Parses a message; images are parts of type image_url with a data: URL."""
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
