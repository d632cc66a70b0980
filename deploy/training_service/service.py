"""TrainingService: sessions and models of tenants, and the acceptance of their requests."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tinker.types as tk

from mobula.cluster.training_service.interfaces import AdapterEngines, AdapterLearner, AdapterSpec
from mobula.deploy.training_service.checkpoints import PREFIX, CheckpointStore, Samplers
from mobula.deploy.training_service.execution import NOT_LOADED, Execution, ModelQueue, Scheduler
from mobula.deploy.training_service.messages import InputBuilder, count_tokens
from mobula.deploy.training_service.store import (
    CheckpointRecord,
    Database,
    Kind,
    ModelRecord,
    RequestOutcome,
    RequestRecord,
    Session,
)
from mobula.deploy.training_service.tenants import Futures, RefusedRequestError, RequestError, ServiceLimits, not_found

CLEANING_S = 30.0
UNUSED_IDLES = 6  # times `session_idle_s`, after which superseded weights of a sampling session are removed
NUM_SEEDS = 2**31 - 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModel:
    """The frozen model of the service. `names` are those that clients may use for it; the first is reported."""

    names: tuple[str, ...]
    tokenizer_id: str  # folder or name that transformers loads
    max_tokens: int  # context length


class TrainingService:
    """The state of the service. Methods named after requests take the tenant that sends them."""

    def __init__(
        self,
        base: BaseModel,
        learner: AdapterLearner,
        engines: AdapterEngines,
        inputs: InputBuilder,
        limits: ServiceLimits,
        folder: Path,
    ) -> None:
        self.base = base
        self.limits = limits
        self.database = Database(folder / "service.sqlite")
        self.futures = Futures(limits.kept_in_memory)
        self.checkpoints = CheckpointStore(self.database, folder / "checkpoints")
        self.samplers = Samplers(engines, self.database, self.futures, self.checkpoints, inputs, limits)
        self.checkpoints.on_sampler = self.samplers.put
        self._execution = Execution(learner, self.database, self.futures, self.checkpoints, inputs, limits, folder)
        self._queues: dict[str, ModelQueue] = {}
        self._models: dict[str, ModelRecord] = {}  # those that cannot be trained as well
        count = partial(count_tokens, inputs=inputs)
        self._scheduler = Scheduler(self._queues, self._execution, limits.max_batch_tokens, count)
        self._sessions: dict[str, Session] = {}
        self._seen: dict[str, float] = {}  # session -> time of its last heartbeat; -inf once it has finished
        self._last_request: dict[str, float] = {}  # model -> time
        self._task: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        """Why the service runs no requests any more; None while it does."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when the service has failed, after the outcomes of all requests are set."""

    async def start(self) -> None:
        """Reads the records and continues with the requests that were not finished."""
        await self.checkpoints.load()
        self._sessions = {session.session_id: session for session in await self.database.all(Session)}
        self._seen = dict.fromkeys(self._sessions, time.monotonic())
        for record in await self.database.all(ModelRecord):
            self._models[record.model_id] = record
            if record.is_trainable:
                self._queues[record.model_id] = await self._stored_queue(record)
        await self.samplers.load()
        self._task = asyncio.create_task(self._run())
        self._scheduler.wake()

    async def close(self) -> None:
        """Stops without waiting for requests; they continue after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.samplers.close()
        await self.database.close()

    def check_running(self) -> None:
        """Raises: RefusedRequestError: the service has failed. Clients retry until it is started again."""
        if self.failure is not None:
            raise RefusedRequestError(503, f"the training service has failed: {self.failure!r}")

    async def create_session(
        self, tenant: str, user_metadata: Mapping[str, Any] | None = None, display_name: str | None = None
    ) -> Session:
        session = Session(secrets.token_hex(12), tenant, time.time(), user_metadata, display_name)
        await self.database.add(session)
        self._sessions[session.session_id] = session
        self._seen[session.session_id] = time.monotonic()
        return session

    def session(self, session_id: str, tenant: str) -> Session:
        """Raises: RefusedRequestError: the tenant has no such session."""
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise not_found("session", session_id)
        return session

    def sessions(self, tenant: str) -> list[Session]:
        """The sessions of a tenant, newest first."""
        own = [session for session in self._sessions.values() if session.tenant == tenant]
        return sorted(own, key=lambda session: -session.created_s)

    def heartbeat(self, session_id: str, tenant: str) -> None:
        self._seen[self.session(session_id, tenant).session_id] = time.monotonic()

    async def finish_session(self, session_id: str, tenant: str) -> None:
        """Takes the models of a session out of the learner until their next request."""
        self.session(session_id, tenant)
        self._seen[session_id] = -math.inf
        for queue in list(self._queues.values()):
            if queue.record.session_id == session_id:
                await self._park(queue)

    def model(self, model_id: str, tenant: str) -> ModelRecord:
        """Raises: RefusedRequestError: the tenant has no such model."""
        record = self._models.get(model_id)
        if record is None or record.tenant != tenant:
            raise not_found("model", model_id)
        return record

    def models(self, tenant: str) -> list[ModelRecord]:
        """The models of a tenant, newest first."""
        own = [record for record in self._models.values() if record.tenant == tenant]
        return sorted(own, key=lambda record: -record.created_s)

    def last_request_s(self, record: ModelRecord) -> float:
        return self._last_request.get(record.model_id, record.created_s)

    async def create_model(self, request: tk.CreateModelRequest, body: bytes, tenant: str) -> str:
        """Accepts a new model; returns the id of the request."""
        self.check_running()
        session = self.session(request.session_id, tenant)
        model_id = f"{session.session_id}:train:{request.model_seq_id}"
        self.check_base(request.base_model)
        if request.lora_config is None:
            raise RefusedRequestError(
                400,
                "a model needs lora_config: use create_lora_training_client (with training_service.weights=full it "
                "trains all weights)",
            )
        _check_optimizer(request.optimizer_config)
        spec = self._spec(request.lora_config)
        return await self._add_model(model_id, session, spec, request.user_metadata, Kind.CREATE, body)

    def _spec(self, lora: tk.LoraConfig) -> AdapterSpec:
        if self.limits.weights == "full":
            return AdapterSpec(rank=0, alpha=self.limits.alpha, seed=0)
        if not 1 <= lora.rank <= self.limits.max_rank:
            raise RefusedRequestError(400, f"rank={lora.rank}: give 1 to {self.limits.max_rank}")
        if not (lora.train_attn or lora.train_mlp):
            raise RefusedRequestError(400, "only the unembedding is to be trained: set train_attn or train_mlp")
        return AdapterSpec(
            rank=lora.rank,
            alpha=self.limits.alpha,
            seed=secrets.randbelow(NUM_SEEDS) if lora.seed is None else lora.seed,
            trains_attention=lora.train_attn,
            trains_mlp=lora.train_mlp,
            trains_unembedding=False,  # the client asks for it by default, and engines serve no such adapters
        )

    async def create_from(self, request: tk.LoadWeightsRequest, body: bytes, tenant: str) -> str:
        """Accepts a new model with the weights of a checkpoint; returns the id of the request."""
        assert request.session_id is not None and request.model_seq_id is not None, "the caller has checked them"
        self.check_running()
        session = self.session(request.session_id, tenant)
        if request.base_model is not None:
            self.check_base(request.base_model)
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config)
        try:
            spec = self.checkpoints.trained(request.path, tenant).spec
        except RequestError as error:
            raise RefusedRequestError(404, str(error)) from error
        model_id = f"{session.session_id}:train:{request.model_seq_id}"
        return await self._add_model(model_id, session, spec, request.user_metadata, Kind.CREATE_FROM, body)

    async def add_copy(self, path: str, tenant: str, session_id: str | None, ttl_s: int | None) -> str:
        """Copies a checkpoint to a new run that cannot be trained; returns its path."""
        source = self.checkpoints.readable(path, tenant)
        session = self.session(session_id, tenant) if session_id is not None else await self.create_session(tenant)
        model_id = f"{session.session_id}:copy:{secrets.token_hex(4)}"
        record = ModelRecord(model_id, tenant, session.session_id, source.spec, time.time(), is_trainable=False)
        await self.database.add(record)
        self._models[model_id] = record
        return (await self.checkpoints.copy(source, model_id, tenant, ttl_s)).path

    async def remove_checkpoint(self, record: CheckpointRecord) -> None:
        await self.samplers.withdraw(record.path)
        await self.checkpoints.remove(record)

    async def submit(self, kind: Kind, model_id: str, seq_id: int | None, body: bytes, tenant: str) -> str:
        """Accepts a request of a model; returns its id. The request is on disk when this returns."""
        self.check_running()
        queue = self._queues.get(self.model(model_id, tenant).model_id)
        if queue is None:
            raise RefusedRequestError(
                400, f"{model_id} holds a copied checkpoint and cannot be trained: load it as a new model"
            )
        if seq_id is None or seq_id < 1:
            raise RefusedRequestError(400, f"seq_id={seq_id}: requests of a model are numbered from 1")
        request = RequestRecord(model_id, seq_id, kind, body)
        if seq_id < queue.next_seq:
            return request.request_id  # sent again
        if seq_id in queue.requests:
            await self.database.add(queue.requests[seq_id])  # on disk, whether the first one is answered or not
            return request.request_id
        if len(queue.requests) >= self.limits.max_queued and seq_id > queue.first_missing:
            raise RefusedRequestError(429, f"{len(queue.requests)} requests of {model_id} are open: wait for results")
        self.futures.open(request.request_id)
        queue.requests[seq_id] = request
        self._last_request[model_id] = time.time()
        await self.database.add(request)
        self._scheduler.wake()
        return request.request_id

    async def unload(self, model_id: str, tenant: str) -> None:
        self.model(model_id, tenant)
        queue = self._queues.get(model_id)
        if queue is not None:
            await self._park(queue)

    async def outcome(self, request_id: str, tenant: str) -> RequestOutcome | None:
        """Returns the outcome of a request; None if it is not finished within `poll_s`."""
        self.check_owner(request_id, tenant)
        if self.futures.is_known(request_id):
            return await self.futures.wait(request_id, self.limits.poll_s)
        model_id, _, number = request_id.rpartition(":")
        stored = None if request_id.startswith(PREFIX) else await self.database.request(model_id, int(number))
        if stored is None or stored.outcome is None:
            action = "send it again" if stored is None else "set training_service.kept_results_s higher"
            raise RefusedRequestError(410, f"the result of request {request_id} is not kept any more: {action}")
        return stored.outcome

    def check_base(self, name: str) -> None:
        """Raises: RefusedRequestError: the service has another base model."""
        if name not in self.base.names:
            raise RefusedRequestError(400, f"base_model {name!r} is not served here: use {self.base.names[0]!r}")

    def check_owner(self, request_id: str, tenant: str) -> None:
        """Raises: RefusedRequestError: the tenant has no such request."""
        address, _, number = request_id.removeprefix(PREFIX).rpartition(":")
        if not number.isdecimal():
            raise not_found("request", request_id)
        if request_id.startswith(PREFIX):
            self.samplers.get(address, tenant)
        else:
            self.model(address, tenant)

    async def _add_model(
        self, model_id: str, session: Session, spec: AdapterSpec, metadata: Any, kind: Kind, body: bytes
    ) -> str:
        first = RequestRecord(model_id, 0, kind, body)
        if model_id in self._models:
            return first.request_id  # sent again
        num_models = sum(
            self._is_active(queue) for queue in self._queues.values() if queue.record.tenant == session.tenant
        )
        if num_models >= self.limits.max_models:
            raise RefusedRequestError(
                400, f"{num_models} models are active, {self.limits.max_models} are allowed: end another session first"
            )
        record = ModelRecord(model_id, session.tenant, session.session_id, spec, time.time(), metadata)
        self._models[model_id] = record
        queue = ModelQueue(record, 0)
        queue.requests[0] = first
        self.futures.open(first.request_id)
        await self.database.add(record, first)
        self._queues[model_id] = queue
        self._scheduler.wake()
        return first.request_id

    def _is_active(self, queue: ModelQueue) -> bool:
        idle_s = time.monotonic() - self._seen[queue.record.session_id]
        return bool(queue.requests) or idle_s < self.limits.session_idle_s

    async def _stored_queue(self, record: ModelRecord) -> ModelQueue:
        position = await self.database.position(record.model_id)
        queue = ModelQueue(
            record,
            position.next_seq,
            {request.seq_id: request for request in position.queued},
            last_step=position.last_step,
        )
        if position.failed_gradient is not None:
            queue.gradient_error = f"request {position.failed_gradient} failed"
        for request in position.queued:
            self.futures.open(request.request_id)
        return queue

    async def _run(self) -> None:
        """Runs requests until cancelled. After a failure that is no request's, every open request fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._scheduler.run())
                tasks.create_task(self._clean())
        except Exception as error:
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        """Fails the open requests of models, on disk as well: a restart must not run what clients know as failed.

        Sampling requests stay: the next start samples them again.
        """
        self.failure = _cause(error)
        logger.critical("the training service has failed", exc_info=error)
        message = (
            f"the training service has failed ({type(self.failure).__name__}: {self.failure}): start it again with the "
            "same --folder, and send the request again"
        )
        outcome = RequestOutcome(error=message, category="server")
        waiting = [request for queue in self._queues.values() for request in queue.requests.values()]
        try:
            for queue in self._queues.values():
                await self._execution.record_failed(queue, outcome)
        except sqlite3.Error:
            logger.exception("open requests are not recorded as failed, so the next start runs them")
        for request in waiting:
            self.futures.finish(request.request_id, outcome)
        self.on_failure()

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(CLEANING_S)
            for queue in list(self._queues.values()):
                if queue.loaded_in != NOT_LOADED and not self._is_active(queue):
                    await self._park(queue)
            limit_s = UNUSED_IDLES * self.limits.session_idle_s
            superseded = [r for r in self.checkpoints.superseded() if self.samplers.idle_s(r) > limit_s]
            for record in [*self.checkpoints.expired(), *superseded]:
                await self.remove_checkpoint(record)

    async def _park(self, queue: ModelQueue) -> None:
        if queue.is_busy or queue.requests:
            return
        queue.is_busy = True
        try:
            await self._execution.park(queue)
        finally:
            queue.is_busy = False
            self._scheduler.wake()


def _cause(error: BaseException) -> BaseException:
    return _cause(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _check_optimizer(config: Any) -> None:
    if config.type != "adamw":
        raise RefusedRequestError(400, f"optimizer {config.type!r} is not offered: use the default, adamw")
