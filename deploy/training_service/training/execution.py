"""Executes the requests of a model in their order."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mobula.cluster.errors import CheckpointError
from mobula.cluster.files import sync_folder
from mobula.cluster.training_service.interfaces import AdapterLearner, LossCall, LossResult
from mobula.deploy.training_service.checkpoints import CheckpointStore
from mobula.deploy.training_service.limits import ServiceLimits
from mobula.deploy.training_service.store import Database, Kind, ModelRecord, RequestOutcome, RequestRecord
from mobula.deploy.training_service.tenants import Futures, RequestError
from mobula.deploy.training_service.wire.inputs import InputBuilder
from mobula.deploy.training_service.wire.training import (
    created,
    loaded,
    read_adam,
    read_call,
    read_load,
    stepped,
    write_result,
)

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
        seq_id = self.next_seq
        while seq_id in self.requests:
            seq_id += 1
        return seq_id

    def computes(self) -> list[RequestRecord]:
        """The forward and forward_backward requests at the head of the queue, in order."""
        found: list[RequestRecord] = []
        while (request := self.requests.get(self.next_seq + len(found))) is not None and request.kind.is_compute:
            found.append(request)
        return found

    def pop(self, request: RequestRecord) -> None:
        """Removes the finished head."""
        assert request.seq_id == self.next_seq, f"request {request.request_id} finished before {self.next_seq}"
        del self.requests[request.seq_id]
        self.next_seq += 1
        self.num_lost = 0


# Execution: runs requests on the learner, records their outcomes, and restores adapters after a failure.
#
# An adapter's state is a function of its snapshot and the requests after it. A request's outcome is on disk before the
# client can see it. When the learner is lost, or the service restarts, an adapter is created, its snapshot is loaded
# and
# the finished requests after it run again, so each optimizer step is applied exactly once to the state that results.

T = TypeVar("T")


MAX_LOSSES = 3  # of the learner while it runs one request


MAX_PAUSE_S = 30.0


logger = logging.getLogger(__name__)


class LearnerLostError(Exception):
    """The learner did not answer, or failed in a way that is not the request's."""


class Execution:
    """Runs requests of models. The caller runs one request, or one batch, of a model at a time."""

    def __init__(
        self,
        learner: AdapterLearner,
        database: Database,
        futures: Futures,
        checkpoints: CheckpointStore,
        inputs: InputBuilder,
        limits: ServiceLimits,
        folder: Path,
    ) -> None:
        self._learner = learner
        self._database = database
        self._futures = futures
        self._checkpoints = checkpoints
        self._inputs = inputs
        self._limits = limits
        self._folder = folder
        self._incarnation = 0
        self._num_losses = 0  # in a row
        self._lost_since = 0.0
        self._resume_at = 0.0

    def pause_s(self) -> float:
        """Seconds until the learner is tried again; 0 if it is available."""
        return max(self._resume_at - time.monotonic(), 0.0)

    def is_loaded(self, queue: ModelQueue) -> bool:
        """Whether the learner holds the model's adapter in its current state."""
        return queue.loaded_in == self._incarnation

    async def restore(self, queue: ModelQueue) -> None:
        """Creates the adapter in the learner and repeats the requests after its snapshot."""
        record, head = queue.record, queue.head
        incarnation = self._incarnation
        try:
            await self._call(self._learner.drop(record.model_id), "drop an adapter")
            await self._call(self._learner.create(record.model_id, record.spec), "create an adapter")
            if record.snapshot:
                await self._call(
                    self._learner.load(record.model_id, Path(record.snapshot), with_optimizer=True), "load a snapshot"
                )
            await self._repeat(queue)
        except LearnerLostError as error:
            self._lose(error)
            if head is not None and time.monotonic() - self._lost_since > self._limits.recovery_s:
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
            results = iter(await self._call(self._learner.compute(calls), "compute losses") if calls else [])
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
        """Runs one request that is neither forward nor forward_backward."""
        try:
            outcome = await self._run(queue, request)
        except LearnerLostError as error:
            self._lose(error)
            await self._count_loss([queue], error)
            return
        except (ValueError, CheckpointError, OSError) as error:
            outcome = _failed(str(error), "user" if isinstance(error, ValueError) else "server")
        await self._finish([(queue, request, outcome)])
        is_due = queue.num_steps >= self._limits.snapshot_steps or request.kind in (Kind.LOAD, Kind.CREATE_FROM)
        if is_due and not outcome.is_failed:
            await self.snapshot(queue)

    async def snapshot(self, queue: ModelQueue) -> None:
        """Writes a snapshot of an adapter between two steps, and drops the requests that it covers."""
        seq_id = queue.next_seq - 1
        old = queue.record.snapshot
        folder = self._folder / "snapshots" / _file_name(queue.model_id) / str(seq_id)
        shutil.rmtree(folder, ignore_errors=True)  # of a snapshot that was not completed
        folder.mkdir(parents=True)
        try:
            await self._call(self._learner.save(queue.model_id, folder), "save a snapshot")
        except (LearnerLostError, ValueError, CheckpointError, OSError) as error:
            self._lose(error)
            return
        await asyncio.to_thread(sync_folder, folder)
        queue.record = await self._database.set_snapshot(
            queue.record, seq_id, str(folder), self._limits.kept_results, self._limits.kept_results_s
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
            await self._call(self._learner.drop(queue.model_id), "drop an adapter")
        except (LearnerLostError, ValueError) as error:
            self._lose(error)

    async def record_failed(self, queue: ModelQueue, outcome: RequestOutcome) -> None:
        """Records `outcome` for the requests of a model that are next in order, after a failure of the service."""
        waiting = [queue.requests[seq_id] for seq_id in range(queue.next_seq, queue.first_missing)]
        step = next((request for request in waiting if request.kind is Kind.STEP), None)
        if step is not None:
            await self._discard_gradient(queue, step)
        await self._database.finish([(request, outcome) for request in waiting])

    async def _run(self, queue: ModelQueue, request: RequestRecord) -> RequestOutcome:
        if request.kind is Kind.CREATE:
            return created(queue.model_id)
        if request.kind is Kind.STEP:
            return await self._step(queue, request)
        if request.kind in (Kind.LOAD, Kind.CREATE_FROM):
            return await self._load(queue, request)
        return await self._checkpoints.save(queue.record, request, self._exported(request.kind))

    async def _step(self, queue: ModelQueue, request: RequestRecord) -> RequestOutcome:
        if queue.gradient_error:
            reason, queue.gradient_error = queue.gradient_error, ""
            await self._discard_gradient(queue, request)
            return _failed(f"no step was made, the gradient is not complete and was discarded: {reason}", "user")
        metrics = await self._call(
            self._learner.step(queue.model_id, read_adam(request.body)), "make an optimizer step"
        )
        outcome = stepped(metrics)
        queue.last_step = request.seq_id
        queue.num_steps += 1
        return outcome

    async def _discard_gradient(self, queue: ModelQueue, step: RequestRecord) -> None:
        """Discards the gradient that a failed step would have applied; the adapter is restored without it."""
        await self._database.discard_gradient(queue.model_id, queue.last_step, step.seq_id)
        queue.loaded_in = NOT_LOADED

    async def _load(self, queue: ModelQueue, request: RequestRecord) -> RequestOutcome:
        path = await self._load_checkpoint(queue, request)
        queue.last_step, queue.gradient_error = request.seq_id, ""
        return loaded(path, queue.model_id)

    async def _load_checkpoint(self, queue: ModelQueue, request: RequestRecord) -> str:
        """Loads the checkpoint that a request names; returns its path."""
        path, with_optimizer = read_load(request.body)
        folder = Path(self._checkpoints.trained(path, queue.record.tenant).folder)
        await self._call(self._learner.load(queue.model_id, folder, with_optimizer=with_optimizer), "load a checkpoint")
        return path

    def _exported(self, kind: Kind) -> Callable[[str, Path], Awaitable[None]]:
        """Returns what writes an adapter to a folder: its whole state, or PEFT's files."""

        async def write(adapter: str, folder: Path) -> None:
            if kind is Kind.SAVE:
                await self._call(self._learner.save(adapter, folder), "save a checkpoint")
            else:
                await self._call(self._learner.export(adapter, folder), "export an adapter")

        return write

    async def _repeat(self, queue: ModelQueue) -> None:
        """Runs the finished requests after the snapshot again, for their effect on the adapter."""
        calls: list[LossCall] = []

        async def add_gradients() -> None:
            if calls:
                for result in await self._call(self._learner.compute(calls), "repeat losses"):
                    if isinstance(result, Exception):
                        raise LearnerLostError(f"a request that succeeded fails when it is repeated: {result}")
                calls.clear()

        for request in await self._database.finished_since(queue.model_id, queue.record.snapshot_seq):
            if request.kind is Kind.FORWARD_BACKWARD:
                calls.append(await asyncio.to_thread(read_call, request.body, self._inputs, self._limits))
            elif request.kind is Kind.STEP:
                await add_gradients()
                await self._call(self._learner.step(queue.model_id, read_adam(request.body)), "repeat a step")
            elif request.kind in (Kind.LOAD, Kind.CREATE_FROM):
                calls.clear()
                await self._load_checkpoint(queue, request)
        await add_gradients()

    def _read_call(self, body: bytes) -> LossCall | RequestOutcome:
        try:
            return read_call(body, self._inputs, self._limits)
        except RequestError as error:
            return _failed(str(error), "user")

    async def _finish(self, finished: Sequence[tuple[ModelQueue, RequestRecord, RequestOutcome]]) -> None:
        """Records outcomes, then gives them to the clients."""
        await self._database.finish([(request, outcome) for _, request, outcome in finished])
        for queue, request, outcome in finished:
            queue.pop(request)
            self._futures.finish(request.request_id, outcome)

    async def _call(self, call: Awaitable[T], what: str) -> T:
        """Awaits the learner."""
        try:
            async with asyncio.timeout(self._limits.learner_s):
                answer = await call
        except (ValueError, CheckpointError):
            raise
        except TimeoutError as error:
            raise LearnerLostError(f"no answer within {self._limits.learner_s:g} s to: {what}") from error
        except Exception as error:
            raise LearnerLostError(f"{what}: {type(error).__name__}: {error}") from error
        self._num_losses = 0
        return answer

    def _lose(self, error: Exception) -> None:
        """Counts a loss of the learner; all adapters have to be restored."""
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


def _file_name(model_id: str) -> str:
    return model_id.replace(":", "-")


def _failed(message: str, category: str) -> RequestOutcome:
    return RequestOutcome(error=message, category=category)


def _outcome(result: LossResult | Exception) -> RequestOutcome:
    if isinstance(result, Exception):
        return _failed(str(result), "user" if isinstance(result, ValueError) else "server")
    if not all(math.isfinite(value) for value in result.metrics.values()):
        logger.warning("a loss is not finite: %s", dict(result.metrics))
    return RequestOutcome(write_result(result), is_proto=True)
