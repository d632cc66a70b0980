"""Environments of other libraries (Gymnasium, OpenEnv, reasoning-gym, TextArena), and of classes of the user's."""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import numpy as np
from PIL import Image

from mobula.actors.datasets.formats.base import json_value
from mobula.actors.datasets.readers.files import parse_object
from mobula.actors.datasets.rows import RowError
from mobula.actors.environments.base import (
    IMAGE_MARK,
    IMAGE_PLACEHOLDER,
    Action,
    EnvironmentSpec,
    EpisodeError,
    Message,
    Reset,
    Step,
    Tool,
    ToolCall,
    as_png,
    describe_tools,
    encoded,
    marked_message,
)
from mobula.cluster.records.json_lines import read_lines
from mobula.cluster.user_code import load

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
    parameters = inspect.signature(method).parameters.values()
    described = {f"{'**' * (p.kind is p.VAR_KEYWORD)}{p.name}": _type_name(p.annotation) for p in parameters}
    return Tool(name, " ".join((inspect.getdoc(method) or name).split("\n\n")[0].split()), described)


def _type_name(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return "any"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _prompt_of(row: Mapping[str, Any], instruction: str) -> str:
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
        self._loop = asyncio.Runner()
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


class GymnasiumEnvironment:
    """The frame is the observation, and a turn is the name of one action; the last name in the text counts.

    `actions` names the discrete actions in order. A turn without a name costs `invalid_reward` and a turn, and leaves
    the environment as it is. `module` is imported first, for libraries that register their environments (`minigrid`).

    Source: Gymnasium 1.4, gymnasium.farama.org/api/env.
    """

    def __init__(
        self,
        *,
        id: str,
        actions: Sequence[str],
        instruction: str,
        max_turns: int,
        invalid_reward: float = 0.0,
        module: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        import gymnasium

        if module:
            importlib.import_module(module)
        self._environment = gymnasium.make(id, render_mode="rgb_array", **(arguments or {}))
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{id} has actions of {space}: only Discrete actions can be named")
        if len(actions) > space.n or not actions:
            raise ValueError(f"{id} has {space.n} actions, options.actions names {len(actions)}: name them in order")
        self._actions = {name.lower(): int(space.start) + number for number, name in enumerate(actions)}
        if len(self._actions) != len(actions):
            raise ValueError(f"options.actions={list(actions)} has a name twice: give each action its own")
        names = "|".join(re.escape(name) for name in sorted(self._actions, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<!\w)(?:{names})(?!\w)", re.IGNORECASE)
        self._instruction = instruction
        self._invalid_reward = invalid_reward
        self.spec = EnvironmentSpec(max_turns=max_turns)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._environment.reset(seed=seed, options=dict(options) or None)
        text = f"<image>{self._instruction} Actions: {', '.join(self._actions)}."
        return Reset((Message("user", text, (self._frame(),)),), {})

    def step(self, action: Action) -> Step:
        names = self._pattern.findall(action.text)
        if not names:
            message = Message("user", f"No action found. Actions: {', '.join(self._actions)}.")
            return Step((message,), self._invalid_reward, False, False, {"is_valid": False})
        _, reward, terminated, truncated, _ = self._environment.step(self._actions[names[-1].lower()])
        message = Message("user", "<image>", (self._frame(),))
        return Step((message,), float(reward), bool(terminated), bool(truncated), {"is_valid": True})

    def close(self) -> None:
        self._environment.close()

    def _frame(self) -> bytes:
        frame = np.asarray(self._environment.render())
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"render() gave {frame.dtype} {frame.shape}: rgb_array is uint8 [H, W, 3]")
        return encoded(frame)


class OpenEnv:
    """A session of the server at `url`; `reset` sends the seed.

    With `action_format=text`, the turn's text is sent as the field `action_field`; with `json`, the turn must be a JSON
    object. The first observation starts with `instruction`. An observation consists of the fields `text_fields`, or of
    all fields except metadata as JSON if there are none; `image_fields` are images in base64. `timeout_s` is for one
    message; the host's timeouts are shorter.

    Source: OpenEnv 0.10.0, `openenv/core/env_server/types.py` and `http_server.py`; the package is not needed.
    """

    def __init__(
        self,
        *,
        url: str,
        instruction: str,
        max_turns: int,
        action_format: Literal["text", "json"] = "text",
        action_field: str = "message",
        text_fields: Sequence[str] = (),
        image_fields: Sequence[str] = (),
        max_message_bytes: int = 16 << 20,
        timeout_s: float = 60.0,
    ) -> None:
        if action_format not in ("text", "json"):
            raise ValueError(f"options.action_format={action_format!r} is unknown: use text or json")
        parts = urlsplit(url)
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if parts.scheme not in schemes or not parts.hostname:
            raise ValueError(f"options.url={url!r} is no URL: give http://HOST:PORT of an OpenEnv server")
        self._url = urlunsplit((schemes[parts.scheme], parts.netloc, f"{parts.path.rstrip('/')}/ws", "", ""))
        self._instruction = instruction
        self._action_field = action_field if action_format == "text" else ""
        self._text_fields, self._image_fields = tuple(text_fields), tuple(image_fields)
        self._max_message_bytes = max_message_bytes
        self._timeout_s = timeout_s
        self.spec = EnvironmentSpec(max_turns=max_turns)
        self._loop = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        message = self._message(self._loop.run(self._exchange({"type": "reset", "data": {"seed": seed}})))
        first = Message("user", f"{self._instruction}\n{message.text}".strip(), message.images)
        return Reset((first,), {})

    def step(self, action: Action) -> Step:
        data = self._action(action.text)
        if data is None:
            return Step((Message("user", "Answer with one JSON object."),), 0.0, False, False, {"is_valid": False})
        answer = self._loop.run(self._exchange({"type": "step", "data": data}))
        reward = answer.get("reward")
        return Step((self._message(answer),), 0.0 if reward is None else reward, bool(answer.get("done")), False, {})

    def close(self) -> None:
        self._loop.run(self._close())
        self._loop.close()

    def _action(self, text: str) -> dict[str, Any] | None:
        if self._action_field:
            return {self._action_field: text}
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None

    def _message(self, answer: Mapping[str, Any]) -> Message:
        observation = answer["observation"]
        images = tuple(base64.b64decode(observation[name]) for name in self._image_fields if observation.get(name))
        if self._text_fields:
            text = "\n".join(str(observation[name]) for name in self._text_fields)
        else:
            shown = {k: v for k, v in observation.items() if k not in (*self._image_fields, "metadata")}
            text = json.dumps(shown, ensure_ascii=False)
        return marked_message("user", IMAGE_MARK * len(images) + text, images)

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message; returns the data of the observation in the reply."""
        try:
            socket = await self._connected()
            await socket.send_json(message)
            answer = await socket.receive_json(timeout=self._timeout_s)
        except (aiohttp.ClientError, OSError, TypeError, ValueError) as error:  # TypeError: the socket was closed
            raise EpisodeError("server_unreachable", f"{self._url}: {type(error).__name__}: {error}") from error
        if answer.get("type") != "observation":
            raise EpisodeError("server_error", f"{self._url} answered {json.dumps(answer)[:300]}")
        return answer["data"]

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        if self._socket is None or self._socket.closed:
            self._socket = await self._session.ws_connect(self._url, max_msg_size=self._max_message_bytes)
        return self._socket

    async def _close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._session is not None:
            await self._session.close()


ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """`task` is a dataset of reasoning-gym with arguments `config`; every seed is another problem.

    The answer is the text in the last `<answer>...</answer>`; a response without it scores 0.

    Source: reasoning-gym 0.1.25, `create_dataset` and `score_answer`.
    """

    spec = EnvironmentSpec(max_turns=1)

    def __init__(self, *, task: str, instruction: str, config: Mapping[str, Any] | None = None) -> None:
        from reasoning_gym import create_dataset

        self._create = partial(create_dataset, task, size=1, **dict(config or {}))
        self._instruction = instruction
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        try:
            self._create(seed=0)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"options.task={task!r} with options.config={dict(config or {})}: {error}") from error

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._dataset = self._create(seed=seed)
        self._entry = self._dataset[0]
        answer = str(self._entry["answer"])
        text = f"{self._entry['question']}\n{self._instruction}"
        return Reset((Message("user", text),), {"answer": answer, "solution": f"<answer>{answer}</answer>"})

    def step(self, action: Action) -> Step:
        answers = ANSWER.findall(action.text)
        score = self._dataset.score_answer(answers[-1].strip(), self._entry) if answers else 0.0
        return Step((), float(score), True, False, {})

    def close(self) -> None:
        """Does nothing."""


RAW = "-raw"  # variant without wrappers, which returns each message once
GAME = -1  # sender of messages of the game


class TextArena:
    """The policy is player 0; a turn is an action, and the observation is the messages since the last turn.

    With `num_players` above 1, `opponent` (`module:function`) gets the messages of another player and returns that
    player's action. The reward is given at the end of the game; an invalid move that the game forgives costs nothing.

    TextArena uses Python's global random state: use `environment.host=process`, `ray` or `remote`.

    Source: TextArena 0.7.4, `make`, `reset`, `get_observation`, `step`, `close`.
    """

    def __init__(
        self,
        *,
        id: str,
        max_turns: int,
        num_players: int = 1,
        opponent: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        import textarena

        if (num_players > 1) != bool(opponent):
            raise ValueError(
                f"options.num_players={num_players} with options.opponent={opponent!r}: name an opponent "
                "(module:function) for a game of several players, and none for a game of one"
            )
        self._opponent: Callable[[str], str] | None = load(opponent) if opponent else None
        try:
            self._game = textarena.make(f"{id.removesuffix(RAW)}{RAW}", **(arguments or {}))
        except (ValueError, TypeError, ImportError, LookupError) as error:
            raise ValueError(f"options.id={id!r}: {error}") from error
        if "seed" not in inspect.signature(self._game.reset).parameters:
            raise ValueError(f"options.id={id!r}: its reset takes no seed, so siblings would get different games")
        self._num_players = num_players
        self.spec = EnvironmentSpec(max_turns=max_turns)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._game.reset(num_players=self._num_players, seed=seed)
        text, done = self._until_our_turn()
        if done:
            raise ValueError(f"the game of seed {seed} ends before the policy's first turn")
        return Reset((Message("user", text),), {})

    def step(self, action: Action) -> Step:
        done, _ = self._game.step(action=action.text)
        text = ""
        if not done:
            text, done = self._until_our_turn()
        if not done:
            return Step((Message("user", text),), 0.0, False, False, {})
        rewards, info = self._game.close()
        is_valid = not info[0]["invalid_move"]
        return Step((), float((rewards or {}).get(0, 0.0)), True, False, {"is_valid": is_valid})

    def close(self) -> None:
        """Does nothing."""

    def _until_our_turn(self) -> tuple[str, bool]:
        """Plays the other players' turns; returns the new messages for player 0, and whether the game has ended."""
        while True:
            player, messages = self._game.get_observation()
            if player == 0:
                return self._text(messages, 0), False
            assert self._opponent is not None, "a game of one player has no opponent"
            done, _ = self._game.step(action=str(self._opponent(self._text(messages, player))))
            if done:
                return "", True

    def _text(self, messages: Sequence[tuple[int, str, Any]], player: int) -> str:
        names = self._game.state.role_mapping
        others = [(sender, text) for sender, text, _ in messages if sender != player]
        lines = [text if sender == GAME else f"[{names.get(sender, sender)}] {text}" for sender, text in others]
        return "\n".join(line.strip() for line in lines).strip() or "Your turn."
