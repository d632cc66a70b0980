"""RequestGate: checks token, body size and read time of every request before it is parsed."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

DRAIN_FACTOR = 4  # times the largest allowed body
OPEN_PATHS = ("/health", "/docs", "/openapi.json")
VIEWER_PATH = "/docs-viewer"  # files of the page at /docs; open without a token


class _Refusal(Exception):
    def __init__(
        self, status: int, detail: str, headers: dict[str, str] | None = None, *, is_more_to_come: bool = True
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers or {}
        self.is_more_to_come = is_more_to_come  # of the body


@dataclass(frozen=True)
class RequestGate:
    """ASGI middleware. Without a `token` every request is admitted; health and API description never need it.

    Answers 401 without the token, 413 for a body above `max_request_bytes`, 408 for a body that takes longer than
    `read_s`, and 503 while `is_full()`, before the body is read. `on_status` gets the status of every POST.
    """

    app: App
    token: str | None
    max_request_bytes: int
    read_s: float
    is_full: Callable[[], bool]
    retry_after_s: int
    on_status: Callable[[int], None]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = self._heard(send) if scope["method"] == "POST" else send
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            self._check(scope, headers)
            body = await self._read(receive)
        except _Refusal as refusal:
            if refusal.is_more_to_come:
                await self._drain(receive)
            await _refuse(send, refusal)
            return
        await self.app(scope, _replay(body, receive), send)

    def _heard(self, send: Send) -> Send:
        async def heard(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.on_status(message["status"])
            await send(message)

        return heard

    def _check(self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]) -> None:
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(f"{VIEWER_PATH}/")
        if not is_open and self.token is not None:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise _Refusal(401, "a bearer token is needed, and not this one", {"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_request_bytes:
            raise self._too_large(int(length))
        if scope["method"] == "POST" and self.is_full():
            raise _Refusal(503, "busy: every thread is scoring", {"Retry-After": str(self.retry_after_s)})

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self.read_s):
                while True:
                    message = await receive()
                    chunks.append(message.get("body", b""))
                    num_bytes += len(chunks[-1])
                    is_more_to_come = message.get("more_body", False)
                    if message["type"] == "http.disconnect":
                        raise _Refusal(400, "the body broke off", is_more_to_come=False)
                    if num_bytes > self.max_request_bytes:
                        raise self._too_large(num_bytes, is_more_to_come=is_more_to_come)
                    if not is_more_to_come:
                        return b"".join(chunks)
        except TimeoutError as error:
            raise _Refusal(408, f"the body took longer than {self.read_s:g} s", is_more_to_come=False) from error

    async def _drain(self, receive: Receive) -> None:
        """Reads the rest of a body up to a limit: a client that is cut off while it sends may not read the reply."""
        num_bytes = 0
        try:
            async with asyncio.timeout(self.read_s):
                while num_bytes < DRAIN_FACTOR * self.max_request_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            return  # the reply was already sent

    def _too_large(self, num_bytes: int, *, is_more_to_come: bool = True) -> _Refusal:
        said = f"the body has {num_bytes} bytes or more, {self.max_request_bytes} are allowed: send fewer samples"
        return _Refusal(413, said, is_more_to_come=is_more_to_come)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body that was read, then later messages."""
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


async def _refuse(send: Send, refusal: _Refusal) -> None:
    body = json.dumps({"detail": str(refusal)}).encode()
    headers = {"Content-Type": "application/json", "Connection": "close", **refusal.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
