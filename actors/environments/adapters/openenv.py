"""OpenEnv: client of an OpenEnv server, with a WebSocket for each episode and JSON `{"type": ..., "data": ...}`."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from mobula.actors.environments.adapters.classes import OwnLoop
from mobula.actors.environments.base import (
    IMAGE_MARK,
    Action,
    EnvironmentSpec,
    EpisodeError,
    Message,
    Reset,
    Step,
    marked_message,
)


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
        self._url = _websocket_url(url)
        self._instruction = instruction
        self._action_field = action_field if action_format == "text" else ""
        self._text_fields, self._image_fields = tuple(text_fields), tuple(image_fields)
        self._max_message_bytes = max_message_bytes
        self._timeout_s = timeout_s
        self.spec = EnvironmentSpec(max_turns=max_turns)
        self._loop = OwnLoop()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        answer = self._loop.run(self._exchange({"type": "reset", "data": {"seed": seed}}))
        message = self._message(answer)
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


def _websocket_url(url: str) -> str:
    """Raises: ValueError: `url` is no URL of a server."""
    parts = urlsplit(url)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError(f"options.url={url!r} is no URL: give http://HOST:PORT of an OpenEnv server")
    return urlunsplit((schemes[parts.scheme], parts.netloc, f"{parts.path.rstrip('/')}/ws", "", ""))
