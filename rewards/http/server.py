"""The reward service: serves the functions of a `rewards` section by HTTP, with health, metrics and an OpenAPI page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import Discriminator, Tag

from mobula.cluster.errors import RewardError
from mobula.cluster.serving import RETRY_AFTER_S, VIEWER_PATH, Address, RequestGate, problems
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, ScoringFailure
from mobula.rewards.http.endpoints import LightrftBody, LightrftReply, QueryForm
from mobula.rewards.http.thread_pool import BusyError, ScorerThreads
from mobula.rewards.http.wire import OutcomeMessage, ScoreBody, ScoreReply

GRACE_S = 1.0  # after the deadline, for the reply of a scorer that stops at it
STATUS_OF = {FailureKind.TIMED_OUT: 504}  # for replies with numbers only; any other failure is 422


def _dialect(body: Any) -> str:
    return "lightrft" if isinstance(body, dict) and "queries" in body else "mobula"


AnyBody = Annotated[
    Annotated[ScoreBody, Tag("mobula")] | Annotated[LightrftBody, Tag("lightrft")], Discriminator(_dialect), Body()
]
Queries = Annotated[QueryForm, Query(description="Whether LightRFT's queries begin with their prompts.")]


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server. `timeout_s` bounds the reading and, separately, the scoring of a request."""

    timeout_s: float
    max_request_bytes: int


class ServerMetrics:
    """Prometheus metrics in a separate registry, so that one process can run several servers."""

    def __init__(self, threads: ScorerThreads) -> None:
        self.registry = CollectorRegistry()
        self.samples = Counter("mobula_rewards_samples", "Samples by outcome.", ["status"], registry=self.registry)
        said = "Requests by status, refused ones too."
        self.requests = Counter("mobula_rewards_requests", said, ["status"], registry=self.registry)
        self.seconds = Histogram("mobula_rewards_seconds", "Seconds from request to reply.", registry=self.registry)
        waiting = Gauge("mobula_rewards_waiting", "Requests that wait for a thread.", registry=self.registry)
        waiting.set_function(lambda: threads.num_waiting)
        busy = Gauge("mobula_rewards_busy", "Threads that are scoring.", registry=self.registry)
        busy.set_function(lambda: threads.num_busy)


class RewardServer:
    """Scores requests in the thread pool and counts them."""

    def __init__(self, threads: ScorerThreads, limits: ServerLimits) -> None:
        self.threads = threads
        self.limits = limits
        self.metrics = ServerMetrics(threads)

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[Outcome]:
        """Returns one outcome per request by the deadline; requests without a score by then time out."""
        seconds = self.limits.timeout_s
        future = self.threads.submit(requests, time.monotonic() + seconds)
        try:
            outcomes = await asyncio.wait_for(asyncio.wrap_future(future), seconds + GRACE_S)
        except TimeoutError:
            failure = ScoringFailure(FailureKind.TIMED_OUT, f"waited {seconds:g} s for the reward functions")
            outcomes = (failure,) * len(requests)
        for outcome in outcomes:
            self.metrics.samples.labels(OutcomeMessage.of(outcome).status).inc()
        return outcomes

    def health(self) -> tuple[int, dict[str, Any]]:
        """Returns (HTTP status, body); unhealthy once every thread hangs."""
        stuck = self.threads.num_stuck(self.limits.timeout_s + GRACE_S)
        is_well = stuck < len(self.threads)
        counts = {"threads": len(self.threads), "busy": self.threads.num_busy, "waiting": self.threads.num_waiting}
        return 200 if is_well else 503, {"status": "ok" if is_well else "stuck", "stuck": stuck, **counts}


def make_app(service: RewardServer, address: Address) -> RequestGate:
    """Returns the service behind its gate."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.threads.close, service.limits.timeout_s)

    app = FastAPIOffline(
        title="Mobula rewards", description=(__doc__ or ""), lifespan=life, redoc_url=None, static_url=VIEWER_PATH
    )
    app.exception_handler(RequestValidationError)(_name_the_field)
    _add_scoring(app, service)
    _add_watching(app, service)
    return RequestGate(
        app,
        address,
        max_request_bytes=service.limits.max_request_bytes,
        read_s=service.limits.timeout_s,
        is_full=service.threads.is_full,
        on_status=lambda status: service.metrics.requests.labels(str(status)).inc(),
    )


def _add_scoring(app: FastAPI, service: RewardServer) -> None:
    bearer = [Depends(HTTPBearer(auto_error=False, description="Checked before the request is read."))]

    async def score(body: AnyBody, queries: Queries = "full") -> Response:
        """Score samples; LightRFT's columns are known by their `queries` and answered in kind."""
        return await _answered(service, body, queries)

    async def lightrft(body: LightrftBody, queries: Queries = "full") -> Response:
        """Score LightRFT's columns; one sample that cannot be scored fails them all: a reply holds only numbers."""
        return await _answered(service, body, queries)

    replies: dict[int | str, dict[str, Any]] = {503: {"description": "Busy: see Retry-After."}}
    app.post("/score", dependencies=bearer, response_model=ScoreReply | LightrftReply, responses=replies)(score)
    replies = {**replies, 504: {"description": "A sample timed out."}}
    app.post("/lightrft", dependencies=bearer, response_model=LightrftReply, responses=replies)(lightrft)


def _add_watching(app: FastAPI, service: RewardServer) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether anything is left that scores."""
        status, said = service.health()
        return JSONResponse(said, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _answered(service: RewardServer, body: ScoreBody | LightrftBody, queries: QueryForm) -> Response:
    with service.metrics.seconds.time():
        return await _reply(service, body, queries)


async def _reply(service: RewardServer, body: ScoreBody | LightrftBody, queries: QueryForm) -> Response:
    try:
        if isinstance(body, ScoreBody):
            outcomes = await service.score([sample.request() for sample in body.samples])
            reply = ScoreReply(outcomes=[OutcomeMessage.of(outcome) for outcome in outcomes])
            return Response(reply.model_dump_json(), media_type="application/json")
        return _numbers(await service.score(body.requests(queries)))
    except BusyError as error:
        return JSONResponse({"detail": f"busy: {error}"}, 503, {"Retry-After": RETRY_AFTER_S})
    except RewardError as error:
        return JSONResponse({"detail": str(error)}, 422)


async def _name_the_field(_: Request, error: RequestValidationError) -> Response:
    return Response(problems(error.errors()), 422, media_type="application/json")


def _numbers(outcomes: Sequence[Outcome]) -> Response:
    """Replies with the rewards, or with an error for the first sample without one: any number would be trained on."""
    rewards: list[float] = []
    for row, outcome in enumerate(outcomes):
        if isinstance(outcome, ScoringFailure):
            detail = f"sample {row} {outcome.kind}: {outcome.reason}"
            return JSONResponse({"detail": detail}, STATUS_OF.get(outcome.kind, 422))
        rewards.append(outcome.value)
    return JSONResponse({"rewards": rewards})
