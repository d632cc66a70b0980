"""Saved weights by path with the access of tenants, and the sampling sessions that use them."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tinker.types as tk

from mobula.cluster.errors import SkippedSample
from mobula.cluster.training_service.interfaces import AdapterEngines
from mobula.deploy.training_service.messages import InputBuilder, json_outcome, parsed, read_sample, write_samples
from mobula.deploy.training_service.store import (
    CheckpointRecord,
    Database,
    Kind,
    ModelRecord,
    PendingSample,
    RequestOutcome,
    RequestRecord,
    SamplingSession,
)
from mobula.deploy.training_service.tenants import Futures, RefusedRequestError, RequestError, ServiceLimits, not_found

SCHEME = "tinker://"
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
SaveRequest = tk.SaveWeightsRequest | tk.SaveWeightsForSamplerRequest | tk.SaveWeightsExternalRequest
SAVED: Mapping[Kind, tuple[str, type[SaveRequest]]] = {  # request -> middle part of the path, message of the client
    Kind.SAVE: (TRAINING, tk.SaveWeightsRequest),
    Kind.SAVE_SAMPLER: (SAMPLER, tk.SaveWeightsForSamplerRequest),
    Kind.SAVE_EXTERNAL: (EXTERNAL, tk.SaveWeightsExternalRequest),
}
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
INFLIGHT = "inflight-"  # prefix of the names of in-flight weights
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 24 * 3600

Writer = Callable[[str, Path], Awaitable[None]]


class CheckpointStore:
    """All checkpoints of the service. Files are below `folder`; records are in the database."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._records: dict[str, CheckpointRecord] = {}
        self.on_sampler: Callable[[SamplingSession], Awaitable[None]] | None = None
        """Receives the sampling session that a save opens."""

    async def load(self) -> None:
        records = await self._database.all(CheckpointRecord)
        self._records = {record.path: record for record in sorted(records, key=lambda record: record.created_s)}

    def any(self, path: str) -> CheckpointRecord | None:
        return self._records.get(path)

    def visible(self, path: str, tenant: str) -> CheckpointRecord | None:
        record = self._records.get(path)
        is_expired = record is not None and record.expires_s is not None and record.expires_s < time.time()
        if record is None or is_expired or not (record.tenant == tenant or record.is_public):
            return None
        return record

    def owned(self, path: str, tenant: str) -> CheckpointRecord:
        record = self.visible(path, tenant)
        if record is None or record.tenant != tenant:
            raise RefusedRequestError(404, _no_checkpoint(path))
        return record

    def readable(self, path: str, tenant: str) -> CheckpointRecord:
        record = self.visible(path, tenant)
        if record is None:
            raise RefusedRequestError(404, _no_checkpoint(path))
        return record

    def trained(self, path: str, tenant: str) -> CheckpointRecord:
        record = self.visible(path, tenant)
        if record is None:
            raise RequestError(_no_checkpoint(path))
        if record.kind != TRAINING:
            raise RequestError(f"{path} holds no optimizer state: load what save_state has written")
        return record

    def of_model(self, model_id: str) -> Iterator[CheckpointRecord]:
        """The listed checkpoints of a model, oldest first."""
        return (r for r in self._records.values() if r.model_id == model_id and not r.is_ephemeral)

    def of_tenant(self, tenant: str) -> Iterator[CheckpointRecord]:
        return (r for r in self._records.values() if r.tenant == tenant and not r.is_ephemeral)

    def newest_inflight(self, model_id: str) -> CheckpointRecord | None:
        records = [r for r in self._records.values() if r.model_id == model_id and r.name.startswith(INFLIGHT)]
        return max(records, key=lambda record: record.created_s, default=None)

    async def save(self, model: ModelRecord, request: RequestRecord, write: Writer) -> RequestOutcome:
        """Writes a checkpoint with `write` and returns the client's answer."""
        kind, model_type = SAVED[request.kind]
        message = parsed(model_type, request.body)
        if isinstance(message, tk.SaveWeightsExternalRequest) and message.age_encryption_recipients:
            raise RequestError("age_encryption_recipients is not supported: encrypt the files after the download")
        is_ephemeral = request.kind is Kind.SAVE_SAMPLER and message.path is None
        name = message.path or f"{'ephemeral-' if is_ephemeral else ''}{request.seq_id:06d}"
        if isinstance(message, tk.SaveWeightsForSamplerRequest) and message.kind == "inflight":
            name = f"{INFLIGHT}{request.seq_id:06d}"
        if not NAME.fullmatch(name):
            raise RequestError(f"checkpoint name {name!r}: use letters, digits, '.', '_' and '-', at most 128")
        path = f"{SCHEME}{model.model_id}/{kind}/{name}"
        folder = self._folder / model.model_id.replace(":", "-") / kind / f"{name}@{request.seq_id}"
        old = self._records.get(path)
        if old is None or old.folder != str(folder):  # else written by this request before a restart
            if old is not None and not getattr(message, "overwrite", False):
                raise RequestError(f"{path} exists: choose another name, or save with overwrite=True")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            await write(model.model_id, folder)
            record = CheckpointRecord(
                path=path,
                model_id=model.model_id,
                tenant=model.tenant,
                kind=kind,
                name=name,
                folder=str(folder),
                spec=model.spec,
                created_s=time.time(),
                num_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
                user_metadata=getattr(message, "user_metadata", None),
                expires_s=expiry(message.ttl_seconds),
                is_ephemeral=is_ephemeral,
            )
            await self.put(record)
            if old is not None:
                await asyncio.to_thread(shutil.rmtree, old.folder, ignore_errors=True)
        return await self._answer(model, message, self._records[path])

    async def _answer(self, model: ModelRecord, message: object, record: CheckpointRecord) -> RequestOutcome:
        if isinstance(message, tk.SaveWeightsRequest):
            return json_outcome(type="save_weights", path=record.path)
        if isinstance(message, tk.SaveWeightsExternalRequest):
            return json_outcome(type="save_weights_external", path=record.path, size_bytes=record.num_bytes)
        assert isinstance(message, tk.SaveWeightsForSamplerRequest)
        if message.path is not None:
            return json_outcome(type="save_weights_for_sampler", path=record.path)
        if message.sampling_session_seq_id is None:
            raise RequestError("save_weights_for_sampler has neither a name nor a sampling session")
        assert self.on_sampler is not None, "the service sets it before it runs requests"
        sampler = SamplingSession(
            sampler_id=f"{model.session_id}:sample:{message.sampling_session_seq_id}",
            tenant=model.tenant,
            session_id=model.session_id,
            path=record.path,
            inflight_model=model.model_id if message.kind == "inflight" else None,
        )
        await self.on_sampler(sampler)
        return json_outcome(type="save_weights_for_sampler", sampling_session_id=sampler.sampler_id)

    async def put(self, record: CheckpointRecord) -> None:
        await self._database.put(record)
        self._records[record.path] = record

    async def copy(self, source: CheckpointRecord, model_id: str, tenant: str, ttl_s: int | None) -> CheckpointRecord:
        folder = self._folder / model_id.replace(":", "-") / source.kind / source.name
        await asyncio.to_thread(shutil.copytree, source.folder, folder, dirs_exist_ok=True)
        record = replace(
            source,
            path=f"{SCHEME}{model_id}/{source.kind}/{source.name}",
            model_id=model_id,
            tenant=tenant,
            folder=str(folder),
            created_s=time.time(),
            expires_s=expiry(ttl_s),
            is_public=False,
            is_ephemeral=False,
        )
        await self.put(record)
        return record

    async def remove(self, record: CheckpointRecord) -> None:
        await self._database.remove(CheckpointRecord, [record.path])
        self._records.pop(record.path, None)
        await asyncio.to_thread(shutil.rmtree, record.folder, ignore_errors=True)

    def superseded(self) -> list[CheckpointRecord]:
        """Returns the weights of sampling sessions, except the newest of each model."""
        own = [record for record in self._records.values() if record.is_ephemeral]
        newest = {(record.model_id, record.name.startswith(INFLIGHT)): record.path for record in own}
        return [record for record in own if record.path not in newest.values()]

    def expired(self) -> list[CheckpointRecord]:
        now = time.time()
        return [record for record in self._records.values() if record.expires_s is not None and record.expires_s < now]


def _no_checkpoint(path: str) -> str:
    return f"there is no checkpoint {path}, or it belongs to another tenant"


def expiry(ttl_s: int | None) -> float | None:
    if ttl_s is None:
        return None
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise RequestError(f"ttl_seconds={ttl_s}: give {MIN_TTL_S} to {MAX_TTL_S}")
    return time.time() + ttl_s


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
