"""The protocol of an environment: its inputs and outputs, checks of both, and tool calls in the text of a policy."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from numbers import Real
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import numpy as np
from PIL import Image

from mobula.actors.environments.programs.call_text import CLOSE, OPEN, CallText, read_calls
from mobula.cluster.errors import MobulaError
from mobula.cluster.records.markup import PLACEHOLDERS, literal, verbatim

IMAGE_PLACEHOLDER = PLACEHOLDERS["image"]
IMAGE_MARK = "\ufdd2"  # placeholder of an image in a text with a literal `<image>`
ROLES_OF_RESET = ("system", "user")
ROLES_OF_STEP = ("user", "tool")
SEEDS_A_SPLIT = 1_000_000  # seeds of train, validation and test start at 0, 1 and 2 times this number


class EpisodeError(MobulaError):
    """One episode failed; the run continues without the reward. `kind` is the name of the counter."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return EpisodeError, (self.kind, str(self))


@dataclass(frozen=True)
class Message:
    """One chat message of an environment; `text` has one `<image>` for each of `images` (encoded files). A text without
    images may contain any markup. If a text with images contains a literal `<image>`, IMAGE_MARK is the placeholder
    instead."""

    role: str
    text: str
    images: tuple[bytes, ...] = field(default=(), repr=False)


Observation = tuple[Message, ...]


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call. `parameters` maps the name of an argument to its description; `schema` is
    the JSON schema of its arguments, if there is one."""

    name: str
    description: str
    parameters: Mapping[str, str]  # a name that starts with ** allows arguments with any name
    schema: Mapping[str, Any] = field(default_factory=dict)

    @property
    def declaration(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        properties = {name: {"description": text} for name, text in self.parameters.items()}
        schema = dict(self.schema) or {"type": "object", "properties": properties}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the policy. `arguments` is empty unless `status` is `ok` or `unknown_tool`."""

    name: str
    arguments: Mapping[str, Any]
    status: str
    """ok | invalid_json | unclosed_block | missing_name | malformed_structure | unknown_tool | unknown_argument"""
    detail: str = ""  # the error, if `status` is not `ok`

    @property
    def error(self) -> str:
        """The observation after a call with a status other than `ok`."""
        return f"error: {self.status}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Action:
    """One turn of the policy: text, tool calls, and whether the length limit truncated it."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    is_truncated: bool = False

    @property
    def status(self) -> str:
        """`none` without calls, the first status that is not `ok`, else `ok`."""
        if not self.tool_calls:
            return "none"
        return next((call.status for call in self.tool_calls if call.status != "ok"), "ok")


@dataclass(frozen=True)
class EnvironmentSpec:
    """Description of an environment. An episode is truncated after `max_turns` turns of the policy.

    `is_deterministic`: equal seeds and actions give equal observations. If a rollout actor is lost, a deterministic
    episode continues on another actor by replaying its turns; other episodes start again. `demonstrates`: the
    environment is a `Demonstrator`. `plays_rows`: the prompts are rows of data; a reset gets the row's images and turns
    as options, and gives no observation.
    """

    max_turns: int
    tools: tuple[Tool, ...] = ()
    is_deterministic: bool = True
    demonstrates: bool = False
    plays_rows: bool = False


class Reset(NamedTuple):
    """The start of an episode. `info` may have the texts `answer` and `solution` (the target of supervised steps)."""

    observation: Observation
    info: Mapping[str, Any]


class Step(NamedTuple):
    """The result of one turn. The reward is a number, or the sum of named parts."""

    observation: Observation
    reward: float | Mapping[str, float]
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class Environment(Protocol):
    """Runs one episode at a time, with the semantics of Gymnasium. Methods are synchronous and run in a host."""

    spec: EnvironmentSpec

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        """Starts an episode. Equal seeds and options must give equal observations."""

    def step(self, action: Action) -> Step: ...

    def close(self) -> None: ...


class Demonstrator(Environment, Protocol):
    """An environment that knows a good turn in every state; a warm start trains on episodes of such turns."""

    def demonstrate(self) -> str:
        """The text of a good next turn. Called after `reset`, and after each `step` that does not end the episode."""


def marked_message(role: str, text: str, images: Sequence[bytes]) -> Message:
    """Builds a message from a `text` with IMAGE_MARK as the placeholder of images; everything else is plain text."""
    is_plain = IMAGE_PLACEHOLDER not in text
    return Message(role, text.replace(IMAGE_MARK, IMAGE_PLACEHOLDER) if is_plain else text, tuple(images))


def placeholder_of(message: Message) -> str:
    """The placeholder of images in a message with images."""
    return IMAGE_MARK if IMAGE_MARK in message.text else IMAGE_PLACEHOLDER


def row_text(message: Message) -> str:
    """The text of a message with the markup of rows (`cluster.records.markup`): placeholders of images are media,
    everything else is plain text."""
    pieces = message.text.split(placeholder_of(message)) if message.images else [message.text.replace(IMAGE_MARK, "")]
    return verbatim(IMAGE_PLACEHOLDER.join(map(literal, pieces)))


def split_of(seed: int) -> tuple[int, int]:
    """The split of a seed (0 train, 1 validation, 2 test), and the index in the split."""
    return divmod(seed, SEEDS_A_SPLIT)


def encoded(pixels: np.ndarray, *, scale: int = 1) -> bytes:
    """Encodes uint8 [H, W, 3] as PNG, each pixel repeated `scale` times in both directions."""
    return as_png(Image.fromarray(np.ascontiguousarray(pixels).repeat(scale, 0).repeat(scale, 1)))


def as_png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.convert("RGB").save(file, format="PNG")
    return file.getvalue()


def observation_hash(observation: Observation) -> str:
    """Equal for equal roles, texts and images."""
    digest = hashlib.sha256()
    for message in observation:
        for part in (message.role.encode(), message.text.encode(), *message.images):
            digest.update(len(part).to_bytes(8, "big") + part)
        digest.update(b"\0" * 8)
    return digest.hexdigest()


def checked_observation(
    observation: Sequence[Message], roles: Sequence[str], *, max_bytes: int, takes_images: bool
) -> Observation:
    """Returns an observation that can be rendered. Raises: EpisodeError: a role, an image or the size is unfit."""
    num_bytes = 0
    for message in observation:
        if not isinstance(message, Message):
            raise EpisodeError("bad_observation", f"an observation holds {type(message).__name__}: return Messages")
        if message.role not in roles:
            raise EpisodeError("unknown_role", f"the role {message.role!r} is none of {', '.join(roles)}: use one")
        num_placeholders = message.text.count(placeholder_of(message))
        if message.images and num_placeholders != len(message.images):
            raise EpisodeError(
                "bad_observation",
                f"a message has {len(message.images)} images and {num_placeholders} {IMAGE_PLACEHOLDER}: write one "
                f"each, or IMAGE_MARK of actors.environments.base where {IMAGE_PLACEHOLDER} is text",
            )
        if message.images and not takes_images:
            raise EpisodeError(
                "image_in_text_model",
                "an observation has an image and policy.model takes none: choose a vision-language model",
            )
        num_bytes += len(message.text.encode()) + sum(map(len, message.images))
    if num_bytes > max_bytes:
        raise EpisodeError(
            "observation_too_large",
            f"an observation has {num_bytes:,} bytes, environment.max_observation_bytes is {max_bytes:,}: "
            "make it smaller or raise the limit",
        )
    return tuple(observation)


def checked_rewards(reward: float | Mapping[str, float]) -> dict[str, float]:
    """Returns the parts of a reward by name. Raises: EpisodeError: a part is no finite number."""
    parts = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
    for name, value in parts.items():
        if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
            raise EpisodeError("reward_not_finite", f"the reward {name}={value!r} is no finite number: return one")
    return {str(name): float(value) for name, value in parts.items()}


def parse_tool_calls(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """Parses every call in `text`, each with a status. Never raises: the policy observes the error of a malformed call.

    The time is linear in the length of the text; calls after the first 32 are ignored.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>', [Tool("f", "", {})])
        (ToolCall(name='f', arguments={}, status='ok', detail=''),)
    """
    known = {tool.name: tool for tool in tools}
    return tuple(_checked(call, known.get(call.name)) for call in read_calls(text))


def describe_tools(tools: Sequence[Tool]) -> str:
    """Describes tools and the call syntax, for the first observation of an environment."""
    described = [
        json.dumps({"name": t.name, "description": t.description, "arguments": dict(t.parameters)}) for t in tools
    ]
    example = f'{OPEN}{{"name": NAME, "arguments": {{...}}}}{CLOSE}'
    return "\n".join(["Tools:", *described, f"Call a tool with {example}"])


def _checked(call: CallText, tool: Tool | None) -> ToolCall:
    if call.status != "ok":
        return ToolCall(*call)
    if tool is None:
        return ToolCall(call.name, call.arguments, "unknown_tool", f"there is no tool {call.name!r}")
    unknown = sorted(set(call.arguments) - set(tool.parameters))
    if unknown and not any(name.startswith("**") for name in tool.parameters):
        takes = ", ".join(tool.parameters) or "none"
        return ToolCall(
            call.name, {}, "unknown_argument", f"{call.name} has no argument {unknown[0]!r}: it has {takes}"
        )
    return ToolCall(*call)


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
    return EnvironmentSpec(**{**given, "tools": tuple(Tool(**tool) for tool in given["tools"])})


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
