"""AgentEndpoint: a chat completions server on loopback; a request waits until the policy has taken its turn."""

from __future__ import annotations

import json
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

from mobula.actors.environments.base import Observation
from mobula.actors.environments.chat_api import answer_of, events_of, message_of

LOOPBACK = "127.0.0.1"
MAX_REQUEST_BYTES = 64 << 20
POLL_S = 0.05  # delay of the server's shutdown
UNFIT = ("tools", "functions")  # unsupported fields of a request


@dataclass(frozen=True, eq=False)
class Call:
    """A request that waits for the answer."""

    messages: Observation
    model: str
    _answer: Future[dict[str, Any]] = field(default_factory=Future)

    def answer(self, text: str, *, is_cut: bool) -> None:
        self._answer.set_result(answer_of(self.model, text, is_cut=is_cut))

    def abandon(self) -> None:
        self._answer.cancel()

    def wait(self) -> dict[str, Any]:
        """Raises: CancelledError: the call was abandoned."""
        return self._answer.result()


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
    """Serves on a free port until it is closed, with one thread for each call."""

    def __init__(self) -> None:
        self._talk: Talk | None = None
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Calls are not logged."""

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True, name="agent endpoint").start()

    def open(self) -> Talk:
        """Opens a new URL; calls to earlier URLs are refused."""
        self._talk = Talk(uuid4().hex, self._server.server_port)
        return self._talk

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        talk = self._talk
        num_bytes = int(request.headers.get("Content-Length", 0))
        if num_bytes > MAX_REQUEST_BYTES:
            return _refuse(request, 413, f"{num_bytes:,} bytes are more than {MAX_REQUEST_BYTES:,}")
        body = request.rfile.read(num_bytes)
        if talk is None or request.path != f"/{talk.name}/v1/chat/completions":
            return _refuse(request, 404, "this episode is over, or the path is not /v1/chat/completions")
        try:
            content = json.loads(body)
            unfit = [name for name in UNFIT if content.get(name)]
            if unfit or content.get("n", 1) != 1:
                raise ValueError(f"{', '.join(unfit) or 'n above 1'} cannot be had: describe tools in the messages")
            messages = tuple(message_of(str(m["role"]), m.get("content")) for m in content["messages"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _refuse(request, 400, f"{type(error).__name__}: {error}")
        call = Call(messages, str(content.get("model", "")))
        talk.put(call)
        try:
            answer = call.wait()
        except CancelledError:
            return _refuse(request, 410, "the episode is over")
        if content.get("stream"):
            return _send(request, 200, "text/event-stream", b"".join(events_of(answer)))
        return _send(request, 200, "application/json", json.dumps(answer).encode())


def _refuse(request: BaseHTTPRequestHandler, status: int, message: str) -> None:
    error = {"error": {"message": message, "type": "invalid_request_error", "code": status}}
    _send(request, status, "application/json", json.dumps(error).encode())


def _send(request: BaseHTTPRequestHandler, status: int, kind: str, content: bytes) -> None:
    request.send_response(status)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)
