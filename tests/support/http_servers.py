"""Real HTTP servers on loopback: ours, and ones that misbehave as the test asks."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from mobula.cluster.serving import Address
from mobula.rewards.contract import Outcome, RewardRequest
from mobula.rewards.http.server import RewardServer, ScorerThreads, make_app

CONNECTION: dict[str, Any] = {  # of a reward function that asks servers; `urls` and `max_attempts` are the test's own
    "max_concurrency": 4, "timeout_s": 5.0, "total_timeout_s": 20.0, "backoff_s": 0.01, "max_backoff_s": 0.05,
    "max_request_bytes": 1 << 20, "max_reply_bytes": 1 << 20, "max_failures": 2, "aside_s": 30.0, "token_env": None,
}  # fmt: skip


@dataclass
class Reply:
    """What a scripted server answers; `hang_s` is how long it waits first."""

    status: int = 200
    body: bytes | dict[str, Any] = b""
    headers: dict[str, str] = field(default_factory=dict)
    hang_s: float = 0.0


@dataclass
class Scripted:
    """An ASGI application that answers each request by `answer(number, parsed body)` and remembers what it was sent."""

    answer: Callable[[int, Any], Reply]
    parse: Callable[[bytes], Any] = json.loads
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_in_flight: int = 0
    most_in_flight: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        body = self.parse(raw)
        self.bodies.append(body)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            reply = self.answer(len(self.bodies), body)
            await asyncio.sleep(reply.hang_s)
        finally:
            self.num_in_flight -= 1
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


@dataclass
class Scorer:
    """A scorer made of a function of one request."""

    is_stuck = False
    function: Callable[[RewardRequest], Outcome]
    is_closed: bool = False

    def score(self, requests: Sequence[RewardRequest], deadline: float) -> list[Outcome]:
        return [self.function(request) for request in requests]

    def close(self) -> None:
        self.is_closed = True


class Running:
    """A uvicorn server in a thread."""

    def __init__(self, app: Any, port: int = 0, grace_s: int = 5) -> None:
        limits = {"log_level": "critical", "lifespan": "auto", "timeout_graceful_shutdown": grace_s}
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, **limits))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 20
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < until, "the server does not start"
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self, *, at_once: bool = False) -> None:
        self._server.should_exit = True
        self._server.force_exit = at_once
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not stop"


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[Running]:
    server = Running(app, port)
    try:
        yield server
    finally:
        server.stop(at_once=True)


def reward_app(
    function: Callable[[RewardRequest], Outcome],
    *,
    token: str | None = None,
    timeout_s: float = 5.0,
    max_request_bytes: int = 1 << 20,
    max_waiting: int = 8,
) -> Any:
    """Our own service with one thread."""
    threads = ScorerThreads([Scorer(function)], max_waiting=max_waiting)
    return make_app(RewardServer(threads, timeout_s, max_request_bytes), Address("127.0.0.1", 0, token))


PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@dataclass
class MediaServer:
    """Requests of a running server. The first `num_together` of them wait for each other, at most 10 s."""

    files: Mapping[str, bytes]  # by path; others are answered with 404
    num_together: int = 1
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.together = threading.Barrier(self.num_together)


@contextmanager
def media_server(
    files: Mapping[str, bytes], num_together: int = 1, redirects: Mapping[str, str] | None = None
) -> Iterator[MediaServer]:
    """The server, until the block ends, and no proxy before it; `redirects` lead to a path or a URL with `{port}`."""
    found = MediaServer(files, num_together)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            if len(found.asked) <= found.num_together:
                found.together.wait(10)
            if place := (redirects or {}).get(self.path):
                self.send_response(302)
                self.send_header("Location", place.format(port=self.server.server_address[1]))
                self.end_headers()
                return
            content = found.files.get(self.path.partition("?")[0])
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: Any) -> None:
            """Nothing is written to the console."""

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    found.url = f"http://127.0.0.1:{running.server_address[1]}"
    try:
        with pytest.MonkeyPatch.context() as environment:
            for name in PROXIES:
                environment.delenv(name, raising=False)
            yield found
    finally:
        running.shutdown()
        running.server_close()
