"""CheckpointStore: saved weights by path, with the access of tenants."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import tinker.types as tk

from mobula.deploy.training_service.messages import json_outcome, parsed
from mobula.deploy.training_service.store import (
    CheckpointRecord,
    Database,
    Kind,
    ModelRecord,
    RequestOutcome,
    RequestRecord,
    SamplingSession,
)
from mobula.deploy.training_service.tenants import RefusedRequestError, RequestError

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
