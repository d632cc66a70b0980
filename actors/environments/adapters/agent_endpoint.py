"""The chat endpoint that programs of agents call."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

from starlette.types import Receive, Scope, Send

from mobula.actors.environments.base import Observation, answer_of, events_of, message_of
from mobula.cluster.serving import Address, Headers, RefusalError, RequestGate, make_server, refuse, reply

LOOPBACK = "127.0.0.1"
MAX_REQUEST_BYTES = 64 << 20
MAX_CONNECTIONS = 64  # of the programs of one environment
READ_S = 60.0
CLOSE_S = 5.0
PATH = "/v1/chat/completions"
UNFIT = ("tools", "functions")  # unsupported fields of a request


@dataclass(frozen=True, eq=False)
class Call:
    messages: Observation
    model: str
    _answer: Future[dict[str, Any]] = field(default_factory=Future)

    def answer(self, text: str, *, is_cut: bool) -> None:
        self._answer.set_result(answer_of(self.model, text, is_cut=is_cut))

    def abandon(self) -> None:
        self._answer.cancel()

    async def wait(self) -> dict[str, Any] | None:
        """Returns the answer; None if the call was abandoned."""
        [done], _ = await asyncio.wait([asyncio.wrap_future(self._answer)])
        return None if done.cancelled() else done.result()


class Talk:
    """The calls to one URL, in order of arrival."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.url = f"http://{LOOPBACK}:{port}/{name}/v1"
        self.events: SimpleQueue[Any] = SimpleQueue()  # calls, and events of the owner
        self._calls: list[Call] = []
        self._is_open = True

    def put(self, call: Call) -> None:
        self._calls.append(call)
        if not self._is_open:
            call.abandon()
        self.events.put(call)

    def close(self) -> None:
        """Abandons waiting and future calls."""
        self._is_open = False
        for call in self._calls:
            call.abandon()


class AgentEndpoint:
    """Implements `Access` by the secret in the URL. Serves on a free port in one thread until it is closed."""

    is_open = False
    hosts: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._talk: Talk | None = None
        gate = RequestGate(self._serve, self, MAX_REQUEST_BYTES, READ_S)
        listener = Address(LOOPBACK, 0, None).listen()
        self._server = make_server(gate, listener, grace_s=0, max_connections=MAX_CONNECTIONS)
        self._server.config.lifespan = "off"
        self._thread = Thread(target=self._server.serve_until_stopped, daemon=True, name="agent endpoint")
        self._thread.start()

    def open(self) -> Talk:
        """Opens a new URL; calls to earlier URLs are refused."""
        self._talk = Talk(uuid4().hex, self._server.server_port)
        return self._talk

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(CLOSE_S)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises: RefusalError: the path is not that of the open episode."""
        if self._talk is None or (scope["method"], scope["path"]) != ("POST", f"/{self._talk.name}{PATH}"):
            raise RefusalError(404, "this episode is over, or the path is not /v1/chat/completions")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        talk = self._talk
        assert talk is not None, "checked before"
        try:
            content = json.loads((await receive())["body"])
            unfit = [name for name in UNFIT if content.get(name)]
            if unfit or content.get("n", 1) != 1:
                raise ValueError(f"{', '.join(unfit) or 'n above 1'} cannot be had: describe tools in the messages")
            messages = tuple(message_of(str(m["role"]), m.get("content")) for m in content["messages"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return await refuse(send, RefusalError(400, f"{type(error).__name__}: {error}"))
        call = Call(messages, str(content.get("model", "")))
        talk.put(call)
        answer = await call.wait()
        if answer is None:
            return await refuse(send, RefusalError(410, "the episode is over"))
        if content.get("stream"):
            return await reply(send, 200, b"".join(events_of(answer)), {}, "text/event-stream")
        return await reply(send, 200, json.dumps(answer).encode(), {})
