"""Ordered execution of the requests of many models on one learner."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import tinker.types as tk

from mobula.cluster.errors import CheckpointError
from mobula.cluster.files import sync_folder
from mobula.cluster.training_service.interfaces import AdapterLearner, LossCall, LossResult
from mobula.deploy.training_service import messages
from mobula.deploy.training_service.checkpoints import CheckpointStore
from mobula.deploy.training_service.store import Database, Kind, ModelRecord, RequestOutcome, RequestRecord
from mobula.deploy.training_service.tenants import Futures, RequestError, ServiceLimits

NOT_LOADED = -1


@dataclass
class ModelQueue:
    """Requests run in the order of their numbers, without gaps: `next_seq` is the first that is not finished."""

    record: ModelRecord
    next_seq: int
    requests: dict[int, RequestRecord] = field(default_factory=dict)
    is_busy: bool = False
    loaded_in: int = NOT_LOADED  # incarnation of the learner that holds the adapter
    last_step: int = 0  # number of the last optimizer step
    num_steps: int = 0  # since the last snapshot
    gradient_error: str = ""  # why the gradient since the last step is not complete
    num_lost: int = 0  # times that the learner was lost while it ran the next request

    @property
    def model_id(self) -> str:
        return self.record.model_id

    @property
    def head(self) -> RequestRecord | None:
        """The request that can run now."""
        return self.requests.get(self.next_seq)

    @property
    def first_missing(self) -> int:
        """The number of the first request that has not arrived."""
        return next(seq_id for seq_id in count(self.next_seq) if seq_id not in self.requests)

    def computes(self) -> list[RequestRecord]:
        """The forward and forward_backward requests at the head of the queue, in order."""
        found: list[RequestRecord] = []
        while (request := self.requests.get(self.next_seq + len(found))) is not None and request.kind.is_compute:
            found.append(request)
        return found

    def pop(self, request: RequestRecord) -> None:
        assert request.seq_id == self.next_seq, f"request {request.request_id} finished before {self.next_seq}"
        del self.requests[request.seq_id]
        self.next_seq += 1
        self.num_lost = 0


T = TypeVar("T")

MAX_LOSSES = 3  # of the learner while it runs one request
MAX_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


class LearnerLostError(Exception):
    """The learner did not answer, or failed in a way that is not the request's."""


@dataclass(eq=False)
class Execution:
    """Runs requests on the learner, records their outcomes, and restores adapters after a failure.

    An adapter's state is a function of its snapshot and the requests after it. A request's outcome is on disk before
    the client can see it. When the learner is lost, or the service restarts, an adapter is created, its snapshot is
    loaded and the finished requests after it run again, so each optimizer step is applied exactly once to the state
    that results. The caller runs one request, or one batch, of a model at a time.
    """

    learner: AdapterLearner
    database: Database
    futures: Futures
    checkpoints: CheckpointStore
    inputs: messages.InputBuilder
    limits: ServiceLimits
    folder: Path
    _incarnation: int = 0
    _num_losses: int = 0  # in a row
    _lost_since: float = 0.0
    _resume_at: float = 0.0

    def pause_s(self) -> float:
        """Seconds until the learner is tried again; 0 if it is available."""
        return max(self._resume_at - time.monotonic(), 0.0)

    def is_loaded(self, queue: ModelQueue) -> bool:
        return queue.loaded_in == self._incarnation

    async def restore(self, queue: ModelQueue) -> None:
        """Creates the adapter in the learner and repeats the requests after its snapshot."""
        record, head = queue.record, queue.head
        incarnation = self._incarnation
        try:
            await self._call(self.learner.drop(record.model_id), "drop an adapter")
            await self._call(self.learner.create(record.model_id, record.spec), "create an adapter")
            if record.snapshot:
                await self._call(
                    self.learner.load(record.model_id, Path(record.snapshot), with_optimizer=True), "load a snapshot"
                )
            await self._repeat(queue)
        except LearnerLostError as error:
            self._lose(error)
            if head is not None and time.monotonic() - self._lost_since > self.limits.recovery_s:
                await self._finish([(queue, head, _failed(f"the learner is not available: {error}", "server"))])
            return
        except (ValueError, CheckpointError) as error:
            logger.warning("adapter %s cannot be restored: %s", record.model_id, error)
            if head is not None:
                await self._finish([(queue, head, _failed(f"the adapter cannot be restored: {error}", "user"))])
            return
        queue.loaded_in = incarnation

    async def compute(self, batch: Sequence[tuple[ModelQueue, Sequence[RequestRecord]]]) -> None:
        """Runs forward and forward_backward requests of several models in one call of the learner."""
        work = [(queue, request) for queue, requests in batch for request in requests]
        read = await asyncio.to_thread(lambda: [self._read_call(request.body) for _, request in work])
        calls = [call for call in read if isinstance(call, LossCall)]
        try:
            results = iter(await self._call(self.learner.compute(calls), "compute losses") if calls else [])
        except (LearnerLostError, ValueError) as error:
            self._lose(error)
            await self._count_loss([queue for queue, _ in batch], error)
            return
        finished: list[tuple[ModelQueue, RequestRecord, RequestOutcome]] = []
        for (queue, request), call in zip(work, read, strict=True):
            outcome = _outcome(next(results)) if isinstance(call, LossCall) else call
            if outcome.is_failed and request.kind is Kind.FORWARD_BACKWARD and not queue.gradient_error:
                queue.gradient_error = f"request {request.seq_id} failed: {outcome.error}"
            finished.append((queue, request, outcome))
        await self._finish(finished)

    async def run(self, queue: ModelQueue, request: RequestRecord) -> None:
        try:
            outcome = await self._run(queue, request)
        except LearnerLostError as error:
            self._lose(error)
            await self._count_loss([queue], error)
            return
        except (ValueError, CheckpointError, OSError) as error:
            outcome = _failed(str(error), "user" if isinstance(error, ValueError) else "server")
        await self._finish([(queue, request, outcome)])
        is_due = queue.num_steps >= self.limits.snapshot_steps or request.kind in (Kind.LOAD, Kind.CREATE_FROM)
        if is_due and not outcome.is_failed:
            await self.snapshot(queue)

    async def snapshot(self, queue: ModelQueue) -> None:
        """Writes a snapshot of an adapter between two steps, and drops the requests that it covers."""
        seq_id = queue.next_seq - 1
        old = queue.record.snapshot
        folder = self.folder / "snapshots" / queue.model_id.replace(":", "-") / str(seq_id)
        shutil.rmtree(folder, ignore_errors=True)  # of a snapshot that was not completed
        folder.mkdir(parents=True)
        try:
            await self._call(self.learner.save(queue.model_id, folder), "save a snapshot")
        except (LearnerLostError, ValueError, CheckpointError, OSError) as error:
            self._lose(error)
            return
        await asyncio.to_thread(sync_folder, folder)
        queue.record = await self.database.set_snapshot(
            queue.record, seq_id, str(folder), self.limits.kept_results, self.limits.kept_results_s
        )
        queue.num_steps = 0
        if old:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    async def park(self, queue: ModelQueue) -> None:
        """Removes an idle adapter from the learner. The next request restores it."""
        if queue.num_steps and queue.last_step == queue.next_seq - 1:
            await self.snapshot(queue)
        queue.loaded_in = NOT_LOADED
        try:
            await self._call(self.learner.drop(queue.model_id), "drop an adapter")
        except (LearnerLostError, ValueError) as error:
            self._lose(error)

    async def record_failed(self, queue: ModelQueue, outcome: RequestOutcome) -> None:
        """Records `outcome` for the requests of a model that are next in order, after a failure of the service."""
        waiting = [queue.requests[seq_id] for seq_id in range(queue.next_seq, queue.first_missing)]
        step = next((request for request in waiting if request.kind is Kind.STEP), None)
        if step is not None:
            await self._discard_gradient(queue, step)
        await self.database.finish([(request, outcome) for request in waiting])

    async def _run(self, queue: ModelQueue, request: RequestRecord) -> RequestOutcome:
        if request.kind is Kind.CREATE:
            return messages.json_outcome(type="create_model", model_id=queue.model_id)
        if request.kind is Kind.STEP:
            return await self._step(queue, request)
        if request.kind in (Kind.LOAD, Kind.CREATE_FROM):
            return await self._load(queue, request)
        write, what = self.learner.export, "export an adapter"  # in PEFT's format
        if request.kind is Kind.SAVE:  # the whole state
            write, what = self.learner.save, "save a checkpoint"
        return await self.checkpoints.save(
            queue.record, request, lambda adapter, folder: self._call(write(adapter, folder), what)
        )

    async def _step(self, queue: ModelQueue, request: RequestRecord) -> RequestOutcome:
        if queue.gradient_error:
            reason, queue.gradient_error = queue.gradient_error, ""
            await self._discard_gradient(queue, request)
            return _failed(f"no step was made, the gradient is not complete and was discarded: {reason}", "user")
        metrics = await self._call(
            self.learner.step(queue.model_id, messages.read_adam(request.body)), "make an optimizer step"
        )
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}  # as JSON requires
        outcome = messages.json_outcome(metrics=finite)
        queue.last_step = request.seq_id
        queue.num_steps += 1
        return outcome

    async def _discard_gradient(self, queue: ModelQueue, step: RequestRecord) -> None:
        """Discards the gradient that a failed step would have applied; the adapter is restored without it."""
        await self.database.discard_gradient(queue.model_id, queue.last_step, step.seq_id)
        queue.loaded_in = NOT_LOADED

    async def _load(self, queue: ModelQueue, request: RequestRecord) -> RequestOutcome:
        path = await self._load_checkpoint(queue, request)
        queue.last_step, queue.gradient_error = request.seq_id, ""
        return messages.json_outcome(type="load_weights", path=path, model_id=queue.model_id)

    async def _load_checkpoint(self, queue: ModelQueue, request: RequestRecord) -> str:
        message = messages.parsed(tk.LoadWeightsRequest, request.body)
        folder = Path(self.checkpoints.trained(message.path, queue.record.tenant).folder)
        loading = self.learner.load(queue.model_id, folder, with_optimizer=message.optimizer)
        await self._call(loading, "load a checkpoint")
        return message.path

    async def _repeat(self, queue: ModelQueue) -> None:
        """Runs the finished requests after the snapshot again, for their effect on the adapter."""
        calls: list[LossCall] = []

        async def add_gradients() -> None:
            if calls:
                for result in await self._call(self.learner.compute(calls), "repeat losses"):
                    if isinstance(result, Exception):
                        raise LearnerLostError(f"a request that succeeded fails when it is repeated: {result}")
                calls.clear()

        for request in await self.database.finished_since(queue.model_id, queue.record.snapshot_seq):
            if request.kind is Kind.FORWARD_BACKWARD:
                calls.append(await asyncio.to_thread(messages.read_call, request.body, self.inputs, self.limits))
            elif request.kind is Kind.STEP:
                await add_gradients()
                await self._call(self.learner.step(queue.model_id, messages.read_adam(request.body)), "repeat a step")
            elif request.kind in (Kind.LOAD, Kind.CREATE_FROM):
                calls.clear()
                await self._load_checkpoint(queue, request)
        await add_gradients()

    def _read_call(self, body: bytes) -> LossCall | RequestOutcome:
        try:
            return messages.read_call(body, self.inputs, self.limits)
        except RequestError as error:
            return _failed(str(error), "user")

    async def _finish(self, finished: Sequence[tuple[ModelQueue, RequestRecord, RequestOutcome]]) -> None:
        await self.database.finish([(request, outcome) for _, request, outcome in finished])
        for queue, request, outcome in finished:
            queue.pop(request)
            self.futures.finish(request.request_id, outcome)

    async def _call(self, call: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self.limits.learner_s):
                answer = await call
        except (ValueError, CheckpointError):
            raise
        except TimeoutError as error:
            raise LearnerLostError(f"no answer within {self.limits.learner_s:g} s to: {what}") from error
        except Exception as error:
            raise LearnerLostError(f"{what}: {type(error).__name__}: {error}") from error
        self._num_losses = 0
        return answer

    def _lose(self, error: Exception) -> None:
        now = time.monotonic()
        if self._num_losses == 0:
            self._lost_since = now
        self._num_losses += 1
        self._incarnation += 1
        pause_s = min(2.0 ** (self._num_losses - 1), MAX_PAUSE_S)
        self._resume_at = now + pause_s
        logger.error("the learner was lost (%s); adapters are restored in %g s", error, pause_s)

    async def _count_loss(self, queues: Sequence[ModelQueue], error: Exception) -> None:
        for queue in queues:
            queue.num_lost += 1
            head = queue.head
            if queue.num_lost >= MAX_LOSSES and head is not None:
                message = f"the learner was lost {queue.num_lost} times while it ran this request: {error}"
                if head.kind is Kind.FORWARD_BACKWARD:
                    queue.gradient_error = message
                elif head.kind is Kind.STEP:
                    await self._discard_gradient(queue, head)
                await self._finish([(queue, head, _failed(message, "server"))])


def _failed(message: str, category: str) -> RequestOutcome:
    return RequestOutcome(error=message, category=category)


def _outcome(result: LossResult | Exception) -> RequestOutcome:
    if isinstance(result, Exception):
        return _failed(str(result), "user" if isinstance(result, ValueError) else "server")
    if not all(math.isfinite(value) for value in result.metrics.values()):
        logger.warning("a loss is not finite: %s", dict(result.metrics))
    return RequestOutcome(messages.write_result(result), is_proto=True)


WAITED_SHARE = 0.25  # of the last call

MAX_WAIT_S = 0.1


@dataclass(eq=False)
class Scheduler:
    """Runs the requests of all models.

    Forward and backward requests of the waiting models run together in one call of the learner at a time, within a
    budget of tokens. Tenants take turns: the tenant that was served last comes last. The other requests run one at a
    time for each model, beside the call.
    """

    queues: Mapping[str, ModelQueue]
    execution: Execution
    max_batch_tokens: int
    count: Callable[[bytes], int]
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_computing: bool = False
    _order: list[str] = field(default_factory=list)  # tenants, the one to serve next first
    _computed_at: dict[str, float] = field(default_factory=dict)  # model -> end of its last call
    _call_s: float = 0.0  # duration of the last call
    _waiting_since: float | None = None

    def wake(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                pause_s = self.execution.pause_s()
                if pause_s > 0:
                    asyncio.get_running_loop().call_later(pause_s, self.wake)
                    continue
                for job in self._jobs():
                    tasks.create_task(job)

    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        """Marks models as busy and returns what to run for them."""
        jobs: list[Coroutine[Any, Any, None]] = []
        ready: list[ModelQueue] = []
        for queue in self.queues.values():
            head = queue.head
            if queue.is_busy or head is None:
                continue
            if not self.execution.is_loaded(queue):
                jobs.append(self._job([queue], partial(self.execution.restore, queue)))
            elif head.kind.is_compute:
                ready.append(queue)
            else:
                jobs.append(self._job([queue], partial(self.execution.run, queue, head)))
        if ready and not self._is_computing and not self._waits_for_others(ready):
            batch = self._batch(ready)
            self._is_computing = True
            jobs.append(self._job([queue for queue, _ in batch], partial(self._computed, batch), is_compute=True))
        return jobs

    def _waits_for_others(self, ready: Sequence[ModelQueue]) -> bool:
        """Whether a model that computed a moment ago may still send its next request, to share the call.

        Without this wait, two clients that each wait for their results would take turns for ever.
        """
        now = time.monotonic()
        since = self._waiting_since = now if self._waiting_since is None else self._waiting_since
        ready_ids = {queue.model_id for queue in ready}
        recent = {m for m, at in self._computed_at.items() if now - at < 2 * self._call_s and m not in ready_ids}
        left_s = since + min(WAITED_SHARE * self._call_s, MAX_WAIT_S) - now
        if recent and left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self.wake)
            return True
        self._waiting_since = None
        return False

    async def _computed(self, batch: Sequence[tuple[ModelQueue, Sequence[RequestRecord]]]) -> None:
        started = time.monotonic()
        await self.execution.compute(batch)
        now = time.monotonic()
        self._call_s = now - started
        self._computed_at = {m: at for m, at in self._computed_at.items() if now - at < 2 * self._call_s}
        self._computed_at |= dict.fromkeys((queue.model_id for queue, _ in batch), now)

    def _job(
        self, queues: list[ModelQueue], work: Callable[[], Awaitable[None]], *, is_compute: bool = False
    ) -> Coroutine[Any, Any, None]:
        for queue in queues:
            queue.is_busy = True

        async def job() -> None:
            try:
                await work()
            finally:
                for queue in queues:
                    queue.is_busy = False
                if is_compute:
                    self._is_computing = False
                self.wake()

        return job()

    def _batch(self, ready: list[ModelQueue]) -> list[tuple[ModelQueue, list[RequestRecord]]]:
        """Takes requests tenant by tenant, one model each in turn, until the budget is used."""
        suspects = [queue for queue in ready if queue.num_lost > 1]
        if suspects:  # alone, so that a request that ends the learner harms no other
            return [(suspects[0], suspects[0].computes()[:1])]
        waiting: dict[str, list[ModelQueue]] = {}
        for queue in ready:
            waiting.setdefault(queue.record.tenant, []).append(queue)
        self._order = [t for t in self._order if t in waiting] + [t for t in waiting if t not in self._order]
        batch: list[tuple[ModelQueue, list[RequestRecord]]] = []
        left = self.max_batch_tokens
        served: list[str] = []
        while waiting and left > 0:
            for tenant in [t for t in self._order if t in waiting]:
                queue = waiting[tenant].pop(0)
                if not waiting[tenant]:
                    del waiting[tenant]
                taken: list[RequestRecord] = []
                for request in queue.computes():
                    num_tokens = self.count(request.body)
                    if num_tokens > left and (batch or taken):
                        break
                    taken.append(request)
                    left -= num_tokens
                if taken:
                    batch.append((queue, taken))
                    served.append(tenant)
                if left <= 0:
                    break
        self._order = [t for t in self._order if t not in served] + list(dict.fromkeys(served))
        return batch
