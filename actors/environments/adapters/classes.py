"""Environments that are classes of the user's: TRL's and VAGEN's methods."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Coroutine, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from mobula.actors.datasets.formats.base import json_value
from mobula.actors.datasets.readers.files import parse_object
from mobula.actors.datasets.rows import RowError
from mobula.actors.environments.base import (
    IMAGE_MARK,
    IMAGE_PLACEHOLDER,
    Action,
    EnvironmentSpec,
    Message,
    Reset,
    Step,
    Tool,
    ToolCall,
    describe_tools,
    marked_message,
)
from mobula.cluster.records.json_lines import read_lines
from mobula.cluster.user_code import load

T = TypeVar("T")


def as_png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.convert("RGB").save(file, format="PNG")
    return file.getvalue()


class OwnLoop:
    """Runs coroutines one at a time, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.close()


NO_TOOLS = ("reset", "get_reward", "close")


class TRLClass:
    """`target` is a class, called with `arguments`; public methods are the tools, described by their docstrings.

    `rows` is a JSONL file: the episode of seed s passes row s (modulo the number of rows) as keywords to `reset`.
    Without `rows`, `reset` gets `seed`. The prompt is the row's `prompt`, or `instruction`, and the result of `reset`.
    An episode ends after a turn without a tool call, or after `max_turns`, with the reward of `get_reward()`. If a tool
    raises, the observation is the error.

    Source: TRL 1.16, `environment_factory` of its GRPO trainer.
    """

    def __init__(
        self,
        *,
        target: str,
        max_turns: int,
        instruction: str,
        arguments: Mapping[str, Any] | None = None,
        rows: str = "",
    ) -> None:
        self._environment = load(target)(**(arguments or {}))
        for method in ("reset", "get_reward"):
            if not callable(getattr(self._environment, method, None)):
                raise ValueError(f"options.target={target!r} has no method {method}: a TRL environment has one")
        self._rows = _read(rows) if rows else []
        self._instruction = instruction
        tools = tuple(_tool(name, method) for name, method in inspect.getmembers(self._environment, callable)
                      if not name.startswith("_") and name not in NO_TOOLS)  # fmt: skip
        self.spec = EnvironmentSpec(max_turns=max_turns, tools=tools)
        self._turn = 0

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._turn = 0
        row = self._rows[seed % len(self._rows)] if self._rows else {"seed": seed}
        text, images = _content(self._environment.reset(**row))
        parts = [describe_tools(self.spec.tools) if self.spec.tools else "", _prompt_of(row, self._instruction), text]
        message = marked_message("user", "\n".join(part for part in parts if part), images)
        return Reset((message,), {key: str(row[key]) for key in ("answer", "solution") if row.get(key) is not None})

    def step(self, action: Action) -> Step:
        self._turn += 1
        is_last = self._turn >= self.spec.max_turns
        if not action.tool_calls:
            return Step((), self._reward(), True, False, {})
        messages = [marked_message("tool", *self._called(call)) for call in action.tool_calls]
        return Step(tuple(messages), self._reward() if is_last else 0.0, False, is_last, {})

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if callable(close):
            close()

    def _reward(self) -> float:
        return self._environment.get_reward()

    def _called(self, call: ToolCall) -> tuple[str, tuple[bytes, ...]]:
        if call.status != "ok":
            return call.error, ()
        try:
            return _content(getattr(self._environment, call.name)(**call.arguments))
        except Exception as error:  # the policy observes the error, as in TRL
            return f"error: {type(error).__name__}: {error}", ()


def _read(path: str) -> list[dict[str, Any]]:
    """Raises: ValueError: the file cannot be read, or has no rows."""
    rows = []
    try:
        for number, line in read_lines(Path(path)):
            rows.append(json_value(parse_object(line, f"line {number}")))
    except (OSError, ValueError, RowError) as error:
        raise ValueError(f"options.rows={path!r} cannot be read ({error}): give a JSONL file") from error
    if not rows:
        raise ValueError(f"options.rows={path!r} has no rows: write one JSON object a line")
    return rows


def _tool(name: str, method: Any) -> Tool:
    """Describes a method as a tool: first paragraph of the docstring, parameters and types."""
    parameters = inspect.signature(method).parameters.values()
    described = {f"{'**' * (p.kind is p.VAR_KEYWORD)}{p.name}": _type_name(p.annotation) for p in parameters}
    return Tool(name, " ".join((inspect.getdoc(method) or name).split("\n\n")[0].split()), described)


def _type_name(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return "any"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _prompt_of(row: Mapping[str, Any], instruction: str) -> str:
    """The text of the row's prompt (a text or messages), else the instruction."""
    prompt = row.get("prompt", instruction)
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_content(message["content"])[0] for message in prompt)


def _content(given: Any) -> tuple[str, tuple[bytes, ...]]:
    """Converts None, a text, an image or a list of parts to a text with placeholders and the images."""
    if given is None:
        return "", ()
    if isinstance(given, Image.Image):
        return IMAGE_MARK, (as_png(given),)
    if isinstance(given, Sequence) and not isinstance(given, str):
        parts = [_content(part) for part in given]
        return "".join(text for text, _ in parts), tuple(p for _, images in parts for p in images)
    if isinstance(given, Mapping) and given.get("type") == "image":
        return _content(given["image"])
    if isinstance(given, Mapping) and given.get("type") == "text":
        return str(given["text"]), ()
    return given if isinstance(given, str) else json.dumps(given, default=str), ()


class VAGENClass:
    """`target` is a class, called with `config` as the only argument.

    An observation is `{"obs_str": ..., "multi_modal_input": {"<image>": [PIL images]}}` with a placeholder for each
    image. `step` returns 4 values, with `done`, or 5 values, with `terminated` and `truncated`.

    Source: VAGEN, `vagen/envs/gym_image_env.py`.
    """

    def __init__(self, *, target: str, max_turns: int, config: Mapping[str, Any] | None = None) -> None:
        self._environment = load(target)(dict(config or {}))
        self._loop = OwnLoop()
        self.spec = EnvironmentSpec(max_turns=max_turns)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        observation, info = self._loop.run(self._environment.reset(seed))
        system = self._loop.run(self._environment.system_prompt())
        messages = [_message("system", system)] if system else []
        return Reset((*messages, _message("user", observation)), _texts(info))

    def step(self, action: Action) -> Step:
        observation, reward, *ends, info = self._loop.run(self._environment.step(action.text))
        terminated, truncated = ends if len(ends) == 2 else (ends[0], False)
        return Step((_message("user", observation),), reward, bool(terminated), bool(truncated), _texts(info))

    def close(self) -> None:
        self._loop.run(self._environment.close())
        self._loop.close()


def _message(role: str, observation: Any) -> Message:
    if isinstance(observation, str):
        return Message(role, observation)
    images = (observation.get("multi_modal_input") or {}).get(IMAGE_PLACEHOLDER, ())
    return Message(role, str(observation["obs_str"]), tuple(as_png(image) for image in images))


def _texts(info: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(info[key]) for key in ("answer", "solution") if key in info}
