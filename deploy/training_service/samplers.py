"""Samplers: sampling sessions, their requests and the adapters that the engines serve for them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tinker.types as tk

from mobula.cluster.errors import SkippedSample
from mobula.cluster.training_service.interfaces import AdapterEngines
from mobula.deploy.training_service.checkpoints import SAMPLER, CheckpointStore
from mobula.deploy.training_service.inputs import InputBuilder
from mobula.deploy.training_service.messages import parsed, read_sample, write_samples
from mobula.deploy.training_service.store import (
    CheckpointRecord,
    Database,
    PendingSample,
    RequestOutcome,
    SamplingSession,
)
from mobula.deploy.training_service.tenants import Futures, RefusedRequestError, RequestError, ServiceLimits, not_found

CLONE_SEQ_IDS = 1_000_000_000  # sequence numbers of one clone of a sampling client
PREFIX = "sample-"
MAX_SEED = 2**31 - 1
RETRY_PAUSE_S = 1.0

logger = logging.getLogger(__name__)


@dataclass
class _Completions:
    """Finished requests of one clone of a sampling session, for its long poll."""

    finished: list[tuple[int, dict[str, Any]]]  # (cursor, completion)
    changed: asyncio.Event


@dataclass(eq=False)
class Samplers:
    """Sampling sessions. Requests are durable until their result is retrieved; a restart samples them again."""

    engines: AdapterEngines
    database: Database
    futures: Futures
    checkpoints: CheckpointStore
    inputs: InputBuilder
    limits: ServiceLimits
    _samplers: dict[str, SamplingSession] = field(default_factory=dict)
    _num_open: dict[str, int] = field(default_factory=dict)  # tenant -> sequences that are not finished
    _served: OrderedDict[str, asyncio.Task[None]] = field(default_factory=OrderedDict)  # path -> the call of `serve`
    _users: dict[str, int] = field(default_factory=dict)  # path -> requests that sample from it
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while weights are taken out of the engines
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _used_at: dict[str, float] = field(default_factory=dict)  # path -> time of the last request
    _started_at: float = field(default_factory=time.time)
    _completions: dict[tuple[str, int], _Completions] = field(default_factory=dict)
    _cursor: int = field(default_factory=lambda: time.time_ns() // 1000)  # above every cursor of an earlier start
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def load(self) -> None:
        self._samplers = {sampler.sampler_id: sampler for sampler in await self.database.all(SamplingSession)}
        for record in await self.database.all(PendingSample):
            if record.sampler_id in self._samplers:
                self._start(record, self._samplers[record.sampler_id])

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def put(self, sampler: SamplingSession) -> None:
        """Adds a session; one with the same id stays."""
        if sampler.sampler_id not in self._samplers:
            await self.database.put(sampler)
            self._samplers[sampler.sampler_id] = sampler

    def get(self, sampler_id: str, tenant: str) -> SamplingSession:
        """Raises: RefusedRequestError: the tenant has no such session."""
        sampler = self._samplers.get(sampler_id)
        if sampler is None or sampler.tenant != tenant:
            raise not_found("sampling session", sampler_id)
        return sampler

    def of_session(self, session_id: str) -> list[str]:
        return [sampler.sampler_id for sampler in self._samplers.values() if sampler.session_id == session_id]

    def check_path(self, path: str, tenant: str) -> CheckpointRecord:
        record = self.checkpoints.readable(path, tenant)
        if record.kind != SAMPLER:
            raise RefusedRequestError(400, f"{path} cannot be sampled from: save with save_weights_for_sampler")
        return record

    async def withdraw(self, path: str) -> None:
        """Takes weights out of the engines before their files are removed."""
        async with self._changing:
            task = self._served.pop(path, None)
            if task is not None and task.done() and not task.exception():
                await self.engines.withdraw(path)
        self._released.set()

    def idle_s(self, record: CheckpointRecord) -> float:
        """Seconds since the last request sampled from these weights."""
        if record.path in self._users:
            return 0.0
        used_at = self._used_at.get(record.path, self._started_at)
        return time.time() - max(used_at, record.created_s)

    async def join(self, sampler_id: str, tenant: str) -> int:
        sampler = self.get(sampler_id, tenant)
        joined = replace(sampler, num_clones=sampler.num_clones + 1)
        self._samplers[sampler_id] = joined
        await self.database.put(joined)
        return joined.num_clones

    async def submit(self, body: bytes, tenant: str) -> tuple[str, list[str]]:
        """Accepts a request; returns its id, and an id for each sequence."""
        try:
            request = parsed(tk.SampleRequest, body)
        except RequestError as error:
            raise RefusedRequestError(422, str(error)) from error
        if request.sampling_session_id is None or request.seq_id is None:
            raise RefusedRequestError(400, "a sampling request needs sampling_session_id and seq_id")
        if not 0 < request.num_samples <= self.limits.max_samples:
            raise RefusedRequestError(
                422, f"num_samples={request.num_samples}: 1 to training_service.max_samples={self.limits.max_samples}"
            )
        sampler = self.get(request.sampling_session_id, tenant)
        request_id = f"{PREFIX}{sampler.sampler_id}:{request.seq_id}"
        ids = [f"{request_id}:{number}" for number in range(request.num_samples)]
        if self.futures.is_known(request_id):
            return request_id, ids
        num_open = self._num_open.get(tenant, 0)
        if num_open and num_open + request.num_samples > self.limits.max_samples:
            raise RefusedRequestError(429, f"{num_open} sequences are open, {self.limits.max_samples} are allowed")
        record = PendingSample(request_id, sampler.sampler_id, body)
        self._start(record, sampler, request)
        await self.database.add(record)
        return request_id, ids

    async def retrieved(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            for request_id in request_ids:
                self.futures.forget(request_id)
            await self.database.remove(PendingSample, request_ids)

    async def completions(
        self, sampler_id: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[dict[str, Any]], int]:
        """Returns what finished after `cursor`, and the new cursor; waits for at most `timeout_s`."""
        completions = self._completions_of(sampler_id, clone)
        completions.finished = [item for item in completions.finished if item[0] > cursor]
        if not completions.finished:
            completions.changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await completions.changed.wait()
            except TimeoutError:
                return [], cursor
        return [item for _, item in completions.finished], max(at for at, _ in completions.finished)

    def cancel(self, request_id: str) -> None:
        for task in self._tasks:
            if task.get_name() == request_id:
                task.cancel()

    def _start(self, record: PendingSample, sampler: SamplingSession, request: tk.SampleRequest | None = None) -> None:
        self.futures.open(record.request_id)
        task = asyncio.create_task(self._run(record, sampler, request), name=record.request_id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, record: PendingSample, sampler: SamplingSession, request: tk.SampleRequest | None) -> None:
        outcome = RequestOutcome(error="the request was cancelled", category="user")
        num_samples = 0
        try:
            request = request or parsed(tk.SampleRequest, record.body)
            num_samples = request.num_samples
            self._num_open[sampler.tenant] = self._num_open.get(sampler.tenant, 0) + num_samples
            async with asyncio.timeout(self.limits.sample_s):
                outcome = await self._sample(record, sampler, request)
        except (ValueError, SkippedSample) as error:
            outcome = RequestOutcome(error=str(error), category="user")
        except TimeoutError:
            message = f"no samples within {self.limits.sample_s:g} s"
            outcome = RequestOutcome(error=message, category="server")
        finally:
            self._num_open[sampler.tenant] = self._num_open.get(sampler.tenant, 0) - num_samples
            self._finish(record, outcome)

    async def _sample(
        self, record: PendingSample, sampler: SamplingSession, request: tk.SampleRequest
    ) -> RequestOutcome:
        """Samples until the engines answer; other failures than of the request are tried again."""
        while True:
            weights = self._weights(sampler)
            call = await asyncio.to_thread(
                read_sample,
                request,
                None if weights is None else weights.path,
                self.inputs,
                seed=random.randrange(MAX_SEED),
                name=record.request_id,
            )
            try:
                if weights is not None:
                    await self._serve(weights)
                result = await self.engines.sample(call)
            except (ValueError, SkippedSample):
                raise
            except Exception:
                logger.exception("sampling %s failed and is tried again", record.request_id)
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            finally:
                if weights is not None:
                    self._release(weights.path)
            return RequestOutcome(write_samples(result, request), is_proto=True)

    def _weights(self, sampler: SamplingSession) -> CheckpointRecord | None:
        """Returns the weights of a session and marks them as used; None for the base model."""
        if sampler.path is None:
            return None
        record = self.checkpoints.visible(sampler.path, sampler.tenant)
        if sampler.inflight_model is not None:
            record = self.checkpoints.newest_inflight(sampler.inflight_model)
        if record is None:
            raise RequestError(f"the checkpoint {sampler.path} was deleted or has expired")
        self._users[record.path] = self._users.get(record.path, 0) + 1
        self._used_at[record.path] = time.time()
        return record

    def _release(self, path: str) -> None:
        self._users[path] -= 1
        if not self._users[path]:
            del self._users[path]
            self._released.set()

    async def _serve(self, record: CheckpointRecord) -> None:
        """Waits until the engines serve the weights, which a request of the caller uses."""
        while not self._is_served(record.path):
            async with self._changing:  # else two calls would count the same room
                if self._is_served(record.path):
                    break
                self._released.clear()
                if await self._make_room():
                    call = self.engines.serve(record.path, Path(record.folder))
                    self._served[record.path] = asyncio.ensure_future(call)
                    break
            await self._released.wait()  # the deadline is that of the request
        self._served.move_to_end(record.path)
        await asyncio.shield(self._served[record.path])

    def _is_served(self, path: str) -> bool:
        """Whether the engines serve the weights or are loading them."""
        task = self._served.get(path)
        return task is not None and not (task.done() and (task.cancelled() or task.exception()))

    async def _make_room(self) -> bool:
        """Takes weights that no request uses out of the engines, those that were used first. Returns whether the
        engines can serve one more."""
        while len(self._served) >= self.limits.max_served:
            idle = (path for path, served in self._served.items() if served.done() and path not in self._users)
            path = next(idle, None)
            if path is None:
                return False
            if not self._served.pop(path).exception():
                await self.engines.withdraw(path)
        return True

    def _finish(self, record: PendingSample, outcome: RequestOutcome) -> None:
        self.futures.finish(record.request_id, outcome)
        seq_id = int(record.request_id.rpartition(":")[2])
        completions = self._completions_of(record.sampler_id, seq_id // CLONE_SEQ_IDS)
        self._cursor += 1
        completion: dict[str, Any] = {"state": "failed" if outcome.is_failed else "finished"}
        completion["request_id"] = record.request_id
        if not outcome.is_failed:
            completion["response_payload_uncompressed_size"] = len(outcome.body)
        completions.finished.append((self._cursor, completion))
        completions.changed.set()

    def _completions_of(self, sampler_id: str, clone: int) -> _Completions:
        return self._completions.setdefault((sampler_id, clone), _Completions([], asyncio.Event()))
