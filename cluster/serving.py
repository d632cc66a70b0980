"""HTTP once for all servers: address, token, and the limits of connections and requests.

A request is refused before its body is read if its Host names neither this server nor a loopback address (a DNS name
that was rebound), if its Origin is another site's, or if it changes state in a form that a page of another site can
send without asking: such a page cannot set `Authorization`, `X-API-Key` or the content type of JSON.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mobula.cluster.errors import PreflightError
from mobula.cluster.proxies import is_loopback
from mobula.configs.errors import ConfigError

Headers = Mapping[bytes, bytes]

PENDING_CONNECTIONS = 512
MAX_CONNECTIONS = 1000
IDLE_S = 15.0  # of a connection without a whole request head; longer than clients keep unused connections
RETRY_AFTER_S = "1"
DRAIN_FACTOR = 4  # times the largest allowed body
JSON = "application/json"
READING = ("GET", "HEAD", "OPTIONS")
NOT_SIMPLE = ("DELETE", "PATCH", "PUT")  # a browser asks before it sends these to another origin
OWN_HEADERS = (b"authorization", b"x-api-key")  # a browser asks before it sends these to another origin
AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s\[\]:@/]+))(?::\d*)?")
OPEN_PATHS = ("/health", "/docs", "/openapi.json")
VIEWER_PATH = "/docs-viewer"  # files of the page at /docs; open without a token
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

_logger = logging.getLogger(__name__)


class RefusalError(Exception):
    """The HTTP status and reason with which a request is refused."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers


class Access(Protocol):
    """Checks who sends a request. `hosts` are further names of the server; `is_open`: it admits every request."""

    @property
    def is_open(self) -> bool: ...

    @property
    def hosts(self) -> frozenset[str]: ...

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises: RefusalError: the request has no right to its path."""


@dataclass(frozen=True)
class Address:
    """Listen address and further names by which clients reach the server. Implements `Access` with a bearer token;
    None admits all requests. Health and the API description never need it."""

    host: str
    port: int
    token: str | None
    names: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.token is None

    @cached_property
    def hosts(self) -> frozenset[str]:
        """The names that a Host header may have besides loopback addresses and the address that was connected to."""
        own = () if is_loopback(self.host) else (socket.gethostname(), socket.getfqdn(), self.host)
        return frozenset(name.lower() for name in (*own, *self.names))

    def check(self, scope: Scope, headers: Headers) -> None:
        if self.token is None or scope["path"] in OPEN_PATHS or scope["path"].startswith(f"{VIEWER_PATH}/"):
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self.token}".encode()):
            raise RefusalError(401, "a bearer token is needed, and not this one", {"WWW-Authenticate": "Bearer"})

    def listen(self, access: Access | None = None, option: str = "--token-env or --token-file") -> socket.socket:
        """A listening socket. `option` names the option of the tokens in an error."""
        if (access or self).is_open and not is_loopback(self.host):
            raise PreflightError(
                f"--host {self.host} is reached from other machines, and there is no token: give {option}, or listen "
                "on 127.0.0.1"
            )
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=PENDING_CONNECTIONS)
        except (OSError, OverflowError) as error:
            message = f"{self.host}:{self.port} cannot be listened on ({error}): give another --host or --port"
            raise PreflightError(message) from error


@dataclass(frozen=True)
class RequestGate:
    """ASGI middleware that refuses requests before they are parsed, and most of them before their body is read.

    Answers 421 to a foreign Host, 403 to an Origin of another site, what `access` raises, 415 to another content
    type than JSON (`media_types`: that of a path), 413 to a body above `max_request_bytes`, 408 to a body that takes
    longer than `read_s`, and 503 while `is_full()`. `on_status` gets the status of every POST.
    """

    app: ASGIApp
    access: Access
    max_request_bytes: int
    read_s: float
    media_types: Mapping[str, str] = field(default_factory=dict)
    is_full: Callable[[], bool] = lambda: False
    on_status: Callable[[int], None] = lambda status: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = self._heard(send) if scope["method"] == "POST" else send
        refusal = None
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            self._check_site(scope, headers)
            self.access.check(scope, headers)
            self._check_form(scope, headers)
        except RefusalError as error:
            refusal = error
        try:
            body = await self._read(receive, refusal)
        except RefusalError as error:
            await refuse(send, error)
            return
        await self.app(scope, _replay(body, receive), send)

    def _heard(self, send: Send) -> Send:
        async def heard(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.on_status(message["status"])
            await send(message)

        return heard

    def _check_site(self, scope: Scope, headers: Headers) -> None:
        given = [value.decode("latin-1").lower() for name, value in scope["headers"] if name.lower() == b"host"]
        host = given[0] if len(given) == 1 else ""
        if not self._is_ours(host, (scope.get("server") or ("",))[0]):
            raise RefusalError(
                421, f"Host {host or 'is missing and'} is not this server's: start it with --allow-host NAME"
            )
        if b"origin" in headers:
            origin = headers[b"origin"].decode("latin-1").lower()
            site = origin.partition("://")[2]
            if site != host and _host_name(site) not in self.access.hosts:
                raise RefusalError(403, f"Origin {origin} is another site's: start the server with --allow-host NAME")

    def _is_ours(self, host: str, connected: str) -> bool:
        name = _host_name(host)
        return name != "" and (is_loopback(name) or name in self.access.hosts or name == connected)

    def _check_form(self, scope: Scope, headers: Headers) -> None:
        length = headers.get(b"content-length", b"0")
        if not (length.isdigit() and length.isascii()):
            raise RefusalError(400, f"Content-Length {length.decode('latin-1')} is no number of bytes")
        if int(length) > self.max_request_bytes:
            raise self._too_large(int(length))
        if scope["method"] in READING:
            return
        expected = self.media_types.get(scope["path"], JSON)
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        has_body = int(length) > 0 or b"transfer-encoding" in headers
        is_asked_for = scope["method"] in NOT_SIMPLE or any(name in headers for name in OWN_HEADERS)
        if kind != expected and (kind or has_body or not is_asked_for):
            raise RefusalError(415, f"the content type is {kind or 'missing'}: send Content-Type: {expected}")
        if scope["method"] == "POST" and self.is_full():
            raise RefusalError(503, "busy: every thread is scoring", {"Retry-After": RETRY_AFTER_S})

    async def _read(self, receive: Receive, refusal: RefusalError | None) -> bytes:
        """Returns the body. That of a refused request is read up to a limit and not kept: a client that is cut off
        while it sends may not read the reply."""
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self.read_s):
                while num_bytes <= DRAIN_FACTOR * self.max_request_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusalError(400, "the body broke off")
                    num_bytes += len(message.get("body", b""))
                    if refusal is None and num_bytes > self.max_request_bytes:
                        refusal = self._too_large(num_bytes)
                    if refusal is None:
                        chunks.append(message.get("body", b""))
                    else:
                        chunks.clear()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            refusal = refusal or RefusalError(408, f"the body took longer than {self.read_s:g} s")
        if refusal is not None:
            raise refusal
        return b"".join(chunks)

    def _too_large(self, num_bytes: int) -> RefusalError:
        said = f"the body has {num_bytes} bytes or more, {self.max_request_bytes} are allowed: send fewer samples"
        return RefusalError(413, said)


class _Connection(H11Protocol):
    """Closes a connection that sends no whole request head for IDLE_S, and each one above the server's limit."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own
        super().connection_made(transport)
        assert self.limit_concurrency is not None, "make_server sets it"
        if len(self.connections) >= self.limit_concurrency:
            transport.write(TOO_MANY)
            transport.close()
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _watch(self) -> None:
        is_waiting = self.conn.their_state is h11.IDLE
        if is_waiting and self._deadline is None:
            self._deadline = self.loop.call_later(IDLE_S, self.transport.close)
        elif not is_waiting and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """A server on one listening socket, whose port is `server_port`."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener
        self.server_port = int(listener.getsockname()[1])

    def serve_until_stopped(self) -> None:
        self.run(sockets=[self._listener])


def make_server(
    app: ASGIApp, listener: socket.socket, *, grace_s: int, max_connections: int = MAX_CONNECTIONS
) -> Server:
    """Returns a server, not started."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        log_config=None,
        log_level="warning",
        limit_concurrency=max_connections,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=grace_s,
    )
    return Server(config, listener)


def run_server(gate: RequestGate, listener: socket.socket, *, grace_s: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight then have `grace_s` to finish. `announce` receives the URL."""
    server = make_server(gate, listener, grace_s=grace_s)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again once it has shut down
        signal.signal(number, lambda *_: None)
    host, port = listener.getsockname()[:2]
    announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    if gate.access.is_open:
        _logger.warning("there is no token: every user and program of this machine may use the server")
    server.serve_until_stopped()


def problems(errors: Sequence[Any]) -> bytes:
    """Returns the reply with the unfit fields of a body alone: FastAPI's own repeats the whole request."""
    return json.dumps({"detail": [{key: d[key] for key in ("loc", "msg", "type")} for d in errors]}).encode()


async def refuse(send: Send, refusal: RefusalError) -> None:
    """Sends the reason in our form and in that of OpenAI's interface."""
    error = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.status}
    body = json.dumps({"detail": str(refusal), "error": error}).encode()
    await reply(send, refusal.status, body, {"Connection": "close", **refusal.headers})


async def reply(send: Send, status: int, body: bytes, headers: Mapping[str, str], kind: str = JSON) -> None:
    pairs = {"Content-Type": kind, "Content-Length": str(len(body)), **headers}
    encoded = [(name.encode(), value.encode()) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def read_token(env: str | None, file: Path | None) -> str | None:
    """The bearer token from an environment variable or a file; None if neither is given."""
    if env is not None and file is not None:
        raise ConfigError("--token-env and --token-file both name a token: give one of them")
    if env is not None:
        token = os.environ.get(env, "")
    elif file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {file} cannot be read ({error}): give a file with the token") from error
    else:
        return None
    if not token:
        raise ConfigError(f"{env or file} holds no token: set it before the server starts")
    return token


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body that was read, then later messages."""
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


def _host_name(authority: str) -> str:
    """Returns the host of HOST, HOST:PORT, [IPV6] or [IPV6]:PORT, without a final dot; empty for another form."""
    parts = AUTHORITY.fullmatch(authority)
    return "" if parts is None else (parts[1] or parts[2]).rstrip(".")
