"""EnvironmentServer: sessions with environments over HTTP, for rollout actors on other machines.

    POST /v1/sessions                                       -> {"session": ID, "name": ..., "spec": {...}}
    POST /v1/sessions/ID/reset {"call": N, "seed": S, "options": {}}    -> {"result": {...}}
    POST /v1/sessions/ID/step  {"call": N, "action": {...}}             -> {"result": {...}}
    POST /v1/sessions/ID/demonstrate {"call": N}                        -> {"result": TEXT}
    DELETE /v1/sessions/ID

An error of an environment is the reply {"failure": {"kind": ..., "detail": ...}} and ends the session. A call with the
number of the previous call gets the same reply again, so that a client may retry.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from mobula.actors.environments.base import (
    Action,
    EpisodeError,
    Json,
    checked_rewards,
    reset_to_json,
    spec_to_json,
    step_to_json,
)
from mobula.actors.environments.hosts.pool import EnvironmentPool, EnvironmentSession
from mobula.cluster.serving import RETRY_AFTER_S, problems
from mobula.configs.schema.data import EnvironmentConfig

NEEDED = {"reset": "seed", "step": "action", "demonstrate": "call"}  # method -> field
CHECKS_A_LIMIT = 4  # checks for abandoned sessions within `idle_s`


class CallBody(BaseModel):
    """One call; `reset` needs the seed, `step` the action."""

    call: Annotated[int, Field(ge=0)]
    seed: int = 0
    options: dict[str, Any] = {}
    action: Action | None = None


@dataclass
class _Held:
    session: EnvironmentSession
    stack: AsyncExitStack
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_call: int = -1
    last_reply: Json = field(default_factory=dict)
    used_at: float = field(default_factory=time.monotonic)


class EnvironmentServer:
    """Serves at most `environment.max_concurrent` concurrent sessions; ends a session without a call for `idle_s`."""

    def __init__(self, config: EnvironmentConfig, *, idle_s: float) -> None:
        self._config = config
        self._idle_s = idle_s
        self._pool = EnvironmentPool(config, takes_images=True)
        self._held: dict[str, _Held] = {}
        self._num_opening = 0

    @property
    def num_sessions(self) -> int:
        return len(self._held)

    def is_full(self) -> bool:
        return len(self._held) + self._num_opening >= self._config.max_concurrent

    async def open(self) -> Json:
        """Raises: EpisodeError: the environment cannot be started."""
        stack = AsyncExitStack()
        self._num_opening += 1
        try:
            session = await stack.enter_async_context(self._pool.session())
        finally:
            self._num_opening -= 1
        name = secrets.token_hex(16)
        self._held[name] = _Held(session, stack)
        return {"session": name, "name": self._config.name, "spec": spec_to_json(session.spec)}

    async def call(self, name: str, method: str, given: CallBody) -> Json:
        held = self._held[name]
        async with held.lock:
            if given.call == held.last_call:
                return held.last_reply
            held.used_at = time.monotonic()
            try:
                reply: Json = {"result": await self._result(held.session, method, given)}
            except EpisodeError as error:
                reply = {"failure": {"kind": error.kind, "detail": str(error)}}
                await self._end(name, error, keep_reply=True)
            held.last_call, held.last_reply, held.used_at = given.call, reply, time.monotonic()
            return reply

    async def end(self, name: str) -> None:
        """Ends a session after its episode; ignores unknown ids."""
        await self._end(name, None, keep_reply=False)

    async def close(self) -> None:
        for name in list(self._held):
            await self.end(name)
        self._pool.close()

    async def end_abandoned(self) -> None:
        """Ends abandoned sessions until cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / CHECKS_A_LIMIT)
            latest = time.monotonic() - self._idle_s
            for name, held in list(self._held.items()):
                if held.used_at < latest and not held.lock.locked():
                    await self._end(name, EpisodeError("abandoned", "no call came"), keep_reply=False)

    async def _result(self, session: EnvironmentSession, method: str, given: CallBody) -> Any:
        if method == "reset":
            return reset_to_json(await session.reset(given.seed, given.options))
        if method == "demonstrate":
            return await session.demonstrate()
        assert given.action is not None, "checked before"
        step = await session.step(given.action)
        checked_rewards(step.reward)  # here, because JSON has no NaN
        return step_to_json(step)

    async def _end(self, name: str, error: Exception | None, *, keep_reply: bool) -> None:
        """Returns the environment to the pool, or closes it after an error. With `keep_reply`, the last reply can be
        requested again."""
        held = self._held.get(name) if keep_reply else self._held.pop(name, None)
        if held is None:
            return
        await held.stack.__aexit__(None if error is None else type(error), error, None)


def make_app(server: EnvironmentServer) -> FastAPI:
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(server.end_abandoned())
        yield
        watching.cancel()
        await server.close()

    app = FastAPI(title="Mobula environment", lifespan=life, docs_url=None, redoc_url=None)

    @app.post("/v1/sessions")
    async def open_session() -> Response:
        if server.is_full():
            return JSONResponse({"detail": "every session is taken"}, 503, {"Retry-After": RETRY_AFTER_S})
        try:
            return JSONResponse(await server.open())
        except EpisodeError as error:
            return JSONResponse({"failure": {"kind": error.kind, "detail": str(error)}})

    @app.exception_handler(RequestValidationError)
    async def unfit(_: Request, error: RequestValidationError) -> Response:
        return Response(problems(error.errors()), 422, media_type="application/json")

    @app.post("/v1/sessions/{name}/{method}")
    async def call(name: str, method: str, body: CallBody) -> Response:
        if method not in NEEDED:
            return JSONResponse({"detail": f"no method {method!r}: use {', '.join(NEEDED)}"}, 404)
        required = NEEDED[method]
        if getattr(body, required) is None or required not in body.model_fields_set:
            return JSONResponse({"detail": f"{method} needs the field {required}"}, 422)
        try:
            return JSONResponse(await server.call(name, method, body))
        except KeyError as error:
            return JSONResponse({"detail": f"there is no session {error}"}, 404)

    @app.delete("/v1/sessions/{name}")
    async def end(name: str) -> Response:
        await server.end(name)
        return JSONResponse({})

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "sessions": server.num_sessions})

    return app
