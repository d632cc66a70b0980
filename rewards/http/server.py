"""The reward service: serves the functions of a `rewards` section by HTTP, with health, metrics and an OpenAPI page."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import Discriminator, Tag

from mobula.cluster.errors import RewardError, StuckError
from mobula.cluster.records.trajectory import Reward
from mobula.cluster.serving import RETRY_AFTER_S, VIEWER_PATH, Address, RequestGate, problems
from mobula.configs.schema.rewards import RewardsConfig
from mobula.rewards.components import ComponentError, RewardScoring
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.http.wire import LightrftBody, LightrftReply, OutcomeMessage, QueryForm, ScoreBody, ScoreReply
from mobula.rewards.tools import Tools

FUNCTION_SHARE = 4  # one answer that hangs may take this part of a request's time, as in a run
MAX_STUCK = 8  # hanging computations after which a scorer refuses requests: each blocks a thread and holds its memory
START_TIMEOUT_S = 120.0  # to import what a reward function needs; a request's own deadline comes first


class RewardScorer:
    """Scores one batch at a time with functions of its own; the breakdown of a score has the components' values. A
    model or engine that hangs is abandoned in its thread, up to MAX_STUCK times; then `is_stuck` is True."""

    def __init__(self, rewards: RewardsConfig, timeout_s: float, device: str, dtype: str) -> None:
        self._tools = Tools.timed(rewards.processes, timeout_s / FUNCTION_SHARE, START_TIMEOUT_S, device, dtype)
        self._scoring = RewardScoring(rewards, None, self._tools)
        self.is_stuck = False

    def score(self, requests: Sequence[RewardRequest], deadline: float) -> list[Outcome]:
        """Returns one outcome per request. Stops isolated calls at `deadline` (`time.monotonic`)."""
        self.is_stuck = self._tools.in_time.num_stuck >= MAX_STUCK
        if self.is_stuck:
            reason = f"{MAX_STUCK} computations hang since earlier requests: restart the server"
            return [ScoringFailure(FailureKind.TIMED_OUT, reason)] * len(requests)
        self._tools.end_at(deadline)
        try:
            return [_outcome(reward) for reward in self._scoring.rewards(requests)]
        except StuckError as error:
            self.is_stuck = True
            return [ScoringFailure(FailureKind.FAILED, f"{error}: restart the server")] * len(requests)

    def close(self) -> None:
        self._tools.close()


def _outcome(reward: Reward | ComponentError) -> Outcome:
    if isinstance(reward, ComponentError):
        return ScoringFailure(reward.kind, str(reward))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in reward.reasons.items())
    return Score(reward.value, reasons, reward.components)


class BusyError(Exception):
    """Every thread is busy and the queue is full."""


class _Slot:
    def __init__(self, scorer: RewardScorer) -> None:
        self.scorer = scorer
        self.busy_since: float | None = None


_Job = tuple["Future[Sequence[Outcome]]", Sequence[RewardRequest], float]


class ScorerThreads:
    """Scores batches in one daemon thread per scorer. A thread that hangs stays busy until the process ends."""

    def __init__(self, scorers: Sequence[RewardScorer], *, max_waiting: int) -> None:
        self._slots = [_Slot(scorer) for scorer in scorers]
        self._max_waiting = max_waiting
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"reward-scorer-{number}", daemon=True)
            for number, slot in enumerate(self._slots)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        return self._jobs.qsize()

    @property
    def num_busy(self) -> int:
        return sum(slot.busy_since is not None for slot in self._slots)

    def num_stuck(self, seconds: float) -> int:
        """Returns the number of threads that score one batch for longer than `seconds`, or have a stuck scorer."""
        now = time.monotonic()
        starts = [(slot.scorer.is_stuck, slot.busy_since) for slot in self._slots]
        return sum(is_stuck or (start is not None and now - start > seconds) for is_stuck, start in starts)

    def __len__(self) -> int:
        return len(self._slots)

    def is_full(self) -> bool:
        return self.num_waiting >= self._max_waiting

    def submit(self, requests: Sequence[RewardRequest], deadline: float) -> Future[Sequence[Outcome]]:
        """Queues requests and returns the future of their outcomes. A future that is cancelled in time is not
        scored."""
        if self.is_full():
            raise BusyError(f"{self.num_busy} threads are busy and {self.num_waiting} requests wait")
        future: Future[Sequence[Outcome]] = Future()
        self._jobs.put((future, requests, deadline))
        return future

    def close(self, timeout_s: float) -> None:
        """Ends the threads after the submitted requests, or at the timeout."""
        until = time.monotonic() + timeout_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for slot in self._slots:
            slot.scorer.close()

    def _work(self, slot: _Slot) -> None:
        while (job := self._jobs.get()) is not None:
            future, requests, deadline = job
            if not future.set_running_or_notify_cancel():
                continue
            slot.busy_since = time.monotonic()
            try:
                future.set_result(slot.scorer.score(requests, deadline))
            except BaseException as error:  # raised in the waiting call
                future.set_exception(error)
            finally:
                slot.busy_since = None


GRACE_S = 1.0  # after the deadline, for the reply of a scorer that stops at it
STATUS_OF = {FailureKind.TIMED_OUT: 504}  # for replies with numbers only; any other failure is 422


def _dialect(body: Any) -> str:
    return "lightrft" if isinstance(body, dict) and "queries" in body else "mobula"


AnyBody = Annotated[
    Annotated[ScoreBody, Tag("mobula")] | Annotated[LightrftBody, Tag("lightrft")], Discriminator(_dialect), Body()
]
Queries = Annotated[QueryForm, Query(description="Whether LightRFT's queries begin with their prompts.")]


class RewardServer:
    """Scores requests in the thread pool and counts them. `timeout_s` bounds the reading and the scoring of each."""

    def __init__(self, threads: ScorerThreads, timeout_s: float, max_request_bytes: int) -> None:
        self.threads = threads
        self.timeout_s = timeout_s
        self.max_request_bytes = max_request_bytes
        self.registry = CollectorRegistry()  # a separate one: one process can run several servers
        self.samples = Counter("mobula_rewards_samples", "Samples by outcome.", ["status"], registry=self.registry)
        said = "Requests by status, refused ones too."
        self.requests = Counter("mobula_rewards_requests", said, ["status"], registry=self.registry)
        self.seconds = Histogram("mobula_rewards_seconds", "Seconds from request to reply.", registry=self.registry)
        waiting = Gauge("mobula_rewards_waiting", "Requests that wait for a thread.", registry=self.registry)
        waiting.set_function(lambda: threads.num_waiting)
        busy = Gauge("mobula_rewards_busy", "Threads that are scoring.", registry=self.registry)
        busy.set_function(lambda: threads.num_busy)

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[Outcome]:
        """Returns one outcome per request by the deadline; requests without a score by then time out."""
        seconds = self.timeout_s
        future = self.threads.submit(requests, time.monotonic() + seconds)
        try:
            outcomes = await asyncio.wait_for(asyncio.wrap_future(future), seconds + GRACE_S)
        except TimeoutError:
            failure = ScoringFailure(FailureKind.TIMED_OUT, f"waited {seconds:g} s for the reward functions")
            outcomes = (failure,) * len(requests)
        for outcome in outcomes:
            self.samples.labels(OutcomeMessage.of(outcome).status).inc()
        return outcomes

    def health(self) -> tuple[int, dict[str, Any]]:
        """Returns (HTTP status, body); unhealthy once every thread hangs."""
        stuck = self.threads.num_stuck(self.timeout_s + GRACE_S)
        is_well = stuck < len(self.threads)
        counts = {"threads": len(self.threads), "busy": self.threads.num_busy, "waiting": self.threads.num_waiting}
        return 200 if is_well else 503, {"status": "ok" if is_well else "stuck", "stuck": stuck, **counts}


def make_app(service: RewardServer, address: Address) -> RequestGate:
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.threads.close, service.timeout_s)

    app = FastAPIOffline(
        title="Mobula rewards", description=(__doc__ or ""), lifespan=life, redoc_url=None, static_url=VIEWER_PATH
    )
    app.exception_handler(RequestValidationError)(_name_the_field)
    _add_scoring(app, service)
    _add_watching(app, service)
    return RequestGate(
        app,
        address,
        max_request_bytes=service.max_request_bytes,
        read_s=service.timeout_s,
        is_full=service.threads.is_full,
        on_status=lambda status: service.requests.labels(str(status)).inc(),
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
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)


async def _answered(service: RewardServer, body: ScoreBody | LightrftBody, queries: QueryForm) -> Response:
    with service.seconds.time():
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
