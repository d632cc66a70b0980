"""`mobula serve`: a policy behind the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from mobula.actors.environments.base import EpisodeError
from mobula.actors.environments.wire import answer_of, events_of, message_of
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.trajectory import FinishReason, Reward
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.serving import Address, RequestGate, run_server
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.deploy.host.run_folder import file_access
from mobula.deploy.serve.conversations import Conversations, LocalPolicy, PolicyAnswer, UnknownSessionError
from mobula.deploy.wiring.roles import sampling_settings

MAX_REQUEST_BYTES = 64 << 20
READ_S = 60.0
MAX_SEED = 2**31 - 1
Session = Annotated[str | None, Header(alias="X-Mobula-Session")]


class ChatMessage(BaseModel):
    """One message; images are parts of type image_url with a data: URL."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatBody(BaseModel):
    """Fields of a chat completion request that are read; values that are not supported are refused."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    max_tokens: Annotated[int | None, Field(gt=0)] = None
    max_completion_tokens: Annotated[int | None, Field(gt=0)] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    stop: str | list[str] | None = None
    n: Literal[1] = 1
    stream: bool = False
    tools: None = None
    user: str | None = None


class SessionBody(BaseModel):
    """A session; those of one task are siblings where they begin alike."""

    model_config = ConfigDict(extra="forbid")

    session: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    task: Annotated[str, Field(max_length=200)] = "task"


class FinishBody(BaseModel):
    """The reward of a session; a session without a reward is not recorded."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float | None, Field(allow_inf_nan=False)] = None
    components: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}


def serve(
    config: RunConfig, address: Address, capture: Path | None, num_siblings: int, announce: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT. `announce` receives the URL."""
    listener = address.listen()
    with file_access(config, *([capture] if capture else [])):
        policy = LocalPolicy(config, keep_files=capture is not None)
        conversations = Conversations(policy, capture, num_siblings=num_siblings)
        app = RequestGate(make_app(policy, conversations), address, MAX_REQUEST_BYTES, READ_S)
        grace_s = math.ceil(config.timeouts.rollout_s)
        run_server(app, listener, grace_s=grace_s, announce=lambda url: announce(f"{url}/v1"))


def make_app(policy: LocalPolicy, conversations: Conversations) -> FastAPI:
    """The endpoint as an ASGI application; it loads the engine when it starts."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await policy.start()
        yield
        conversations.close()
        await policy.close()

    app = FastAPI(title="Mobula policy", lifespan=life, docs_url=None, redoc_url=None)
    model = policy.config.policy.model

    @app.exception_handler(RequestValidationError)
    async def unfit(_: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(f"{'.'.join(map(str, d['loc'][1:]))}: {d['msg']}" for d in error.errors())
        return _error(422, problems, "invalid_request_error")

    @app.post("/v1/chat/completions")
    async def complete(body: ChatBody, session: Session = None) -> Response:
        try:
            messages = [message_of(message.role, message.content) for message in body.messages]
            name = session or body.user
            settings = settings_of(policy.config, body, is_kept=name is not None)
            answer = await conversations.complete(name, messages, settings)
        except UnknownSessionError as error:
            return _error(404, str(error), "unknown_session")
        except (SkippedSample, EpisodeError, ValueError) as error:
            return _error(400, str(error), "invalid_request_error")
        reply = _reply(policy, answer)
        if body.stream:
            return StreamingResponse(events_of(reply), media_type="text/event-stream")
        return JSONResponse(reply)

    @app.post("/v1/sessions")
    async def open_session(body: SessionBody) -> Response:
        session = body.session or uuid4().hex
        try:
            conversations.open(session, body.task)
        except ValueError as error:
            return _error(409, str(error), "session_exists")
        return JSONResponse({"session": session})

    @app.post("/v1/sessions/{session}/finish")
    async def finish(session: str, body: FinishBody) -> Response:
        reward = None if body.reward is None else Reward(body.reward, body.components)
        try:
            return JSONResponse({"trajectories": conversations.finish(session, reward)})
        except UnknownSessionError as error:
            return _error(404, str(error), "unknown_session")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "mobula"}]})

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "sessions": conversations.num_sessions})

    return app


def settings_of(config: RunConfig, body: ChatBody, *, is_kept: bool) -> SamplingSettings:
    """The settings of the request, else those of `sampler`; `is_kept`: the call becomes a trajectory."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    own = sampling_settings(config)
    settings = replace(
        own,
        num_samples=1,
        temperature=own.temperature if body.temperature is None else body.temperature,
        max_tokens=body.max_completion_tokens or body.max_tokens or own.max_tokens,
        seed=uuid4().int % MAX_SEED if body.seed is None else body.seed,
        top_p=own.top_p if body.top_p is None else body.top_p,
        top_k=own.top_k if body.top_k is None else body.top_k,
        stop_strings=stop or own.stop_strings,
    )
    is_cut = settings.top_p < 1 or settings.top_k > 0 or settings.min_p > 0
    if is_kept and is_cut and config.sampler.kind is SamplerKind.VLLM and settings.top_k == 0:
        raise ValueError(
            f"top_p={settings.top_p:g} cuts the distribution, and sampler.kind=vllm reports what it keeps, which a "
            "trajectory needs, only where their number has a bound: send top_k as well, start the server with "
            "sampler=huggingface, or call without a session"
        )
    return replace(settings, keeps_sets=is_kept and is_cut)


def _reply(policy: LocalPolicy, answer: PolicyAnswer) -> dict[str, Any]:
    """OpenAI's form; `prompt_token_ids` and `token_ids` are ours, named as vLLM names them."""
    prompt_ids, token_ids = answer.prompt.expanded_ids.tolist(), answer.token_ids
    tokens = [policy.chat.decode([token]) for token in token_ids]
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, answer.sampled.logprobs.tolist(), strict=True)
    ]
    is_cut = answer.sampled.finish_reason is FinishReason.LENGTH
    reply = answer_of(policy.config.policy.model, answer.text, is_cut=is_cut)
    [choice] = reply["choices"]
    choice |= {"logprobs": {"content": content}, "token_ids": token_ids}
    num_tokens = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)}
    return {
        **reply,
        "usage": {**num_tokens, "total_tokens": len(prompt_ids) + len(token_ids)},
        "prompt_token_ids": prompt_ids,
        "is_continued": answer.is_continued,
    }


def _error(status: int, message: str, kind: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
