"""Routes of training runs, checkpoints and their files."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tinker.types as tk
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from mobula.deploy.training_service.checkpoints import EXTERNAL, SAMPLER, SCHEME, TRAINING, expiry
from mobula.deploy.training_service.messages import TtlBody, WeightsBody, parsed
from mobula.deploy.training_service.service import TrainingService
from mobula.deploy.training_service.store import CheckpointRecord, CopyRecord, ModelRecord, Session
from mobula.deploy.training_service.tenants import RefusedRequestError, tenant_of

TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
URL_LIFE_S = 3600
CHECKPOINT = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"


def add_rest_routes(app: FastAPI, service: TrainingService) -> None:
    _add_sessions(app, service)
    _add_runs(app, service)
    _add_checkpoints(app, service)
    _add_files(app, service)


def _add_sessions(app: FastAPI, service: TrainingService) -> None:
    @app.get("/api/v1/sessions")
    async def list_sessions(request: Request, limit: int = 20, offset: int = 0) -> Response:
        ids = [session.session_id for session in service.sessions(tenant_of(request))]
        return JSONResponse({"sessions": ids[offset : offset + limit]})

    @app.get("/api/v1/sessions/{session_id}")
    async def get_session(session_id: str, request: Request) -> Response:
        tenant = tenant_of(request)
        return JSONResponse(_session(service, service.session(session_id, tenant), tenant))

    @app.get("/api/v1/whoami")
    async def whoami(request: Request) -> Response:
        return JSONResponse({"user_urn": f"tenant:{tenant_of(request)}", "org_urn": "mobula"})


def _add_runs(app: FastAPI, service: TrainingService) -> None:
    @app.get("/api/v1/training_runs")
    async def list_runs(request: Request, limit: int = 20, offset: int = 0) -> Response:
        records = service.models(tenant_of(request))
        runs = [_run(service, record) for record in records[offset : offset + limit]]
        return JSONResponse({"training_runs": runs, "cursor": _cursor(offset, limit, records)})

    @app.get("/api/v1/training_runs/{model_id}")
    async def get_run(model_id: str, request: Request) -> Response:
        return JSONResponse(_run(service, service.model(model_id, tenant_of(request))))


def _add_checkpoints(app: FastAPI, service: TrainingService) -> None:
    checkpoints = service.checkpoints

    @app.get("/api/v1/checkpoints")
    async def list_own(request: Request, limit: int = 100, offset: int = 0) -> Response:
        records = list(checkpoints.of_tenant(tenant_of(request)))[::-1]
        shown = [_checkpoint(record) for record in records[offset : offset + limit]]
        return JSONResponse({"checkpoints": shown, "cursor": _cursor(offset, limit, records)})

    @app.get("/api/v1/training_runs/{model_id}/checkpoints")
    async def list_of_run(model_id: str, request: Request) -> Response:
        service.model(model_id, tenant_of(request))
        return JSONResponse({"checkpoints": [_checkpoint(record) for record in checkpoints.of_model(model_id)]})

    @app.delete(CHECKPOINT)
    async def delete(model_id: str, kind: str, name: str, request: Request) -> Response:
        await service.remove_checkpoint(checkpoints.owned(_path(model_id, kind, name), tenant_of(request)))
        return Response(status_code=204)

    @app.post(f"{CHECKPOINT}/publish")
    @app.delete(f"{CHECKPOINT}/publish")
    async def publish(model_id: str, kind: str, name: str, request: Request) -> Response:
        record = checkpoints.owned(_path(model_id, kind, name), tenant_of(request))
        await checkpoints.put(replace(record, is_public=request.method == "POST"))
        return Response(status_code=204)

    @app.put(f"{CHECKPOINT}/ttl")
    async def set_ttl(model_id: str, kind: str, name: str, request: Request) -> Response:
        record = checkpoints.owned(_path(model_id, kind, name), tenant_of(request))
        ttl = parsed(TtlBody, await request.body())
        await checkpoints.put(replace(record, expires_s=expiry(ttl.ttl_seconds)))
        return Response(status_code=204)

    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> Response:
        body = parsed(WeightsBody, await request.body())
        record = checkpoints.readable(body.tinker_path, tenant_of(request))
        spec = record.spec
        return JSONResponse(
            {
                "base_model": service.base.names[0],
                "is_lora": spec.is_adapter,
                "lora_rank": spec.lora_rank,
                "train_unembed": spec.trains_unembedding or not spec.is_adapter,
                "train_mlp": spec.trains_mlp,
                "train_attn": spec.trains_attention,
            }
        )

    @app.post("/api/v1/copy_weights")
    async def copy_weights(request: Request) -> Response:
        message, tenant = parsed(tk.CopyWeightsRequest, await request.body()), tenant_of(request)
        key = f"{tenant}/{request.headers.get('x-idempotency-key', secrets.token_hex(16))}"
        copy = await service.database.find(CopyRecord, key)
        if copy is None:
            path = await service.add_copy(message.source_path, tenant, message.session_id, message.ttl_seconds)
            copy = CopyRecord(key, path)
            await service.database.add(copy)
        return JSONResponse({"tinker_path": copy.path})


def _add_files(app: FastAPI, service: TrainingService) -> None:
    """Downloads of exported adapters, by signed addresses that need no token."""
    key = secrets.token_bytes(32)

    @app.get(f"{CHECKPOINT}/external_weights_urls")
    async def urls(model_id: str, kind: str, name: str, request: Request) -> Response:
        path = _path(model_id, kind, name)
        record = service.checkpoints.readable(path, tenant_of(request))
        if kind != EXTERNAL:
            raise RefusedRequestError(400, f"{path} is not an export: use save_weights_external")
        ends = int(time.time()) + URL_LIFE_S
        base = str(request.base_url).rstrip("/")
        folder = Path(record.folder)
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        signed = {
            file: f"{base}/files/{ends}/{_sign(key, ends, path, file)}/{model_id}/{name}/{file}" for file in files
        }
        return JSONResponse({"urls": signed, "expires": _time(ends)})

    @app.get("/files/{ends}/{signature}/{model_id}/{name}/{file:path}")
    async def download(ends: int, signature: str, model_id: str, name: str, file: str) -> Response:
        path = _path(model_id, EXTERNAL, name)
        if time.time() > ends or not hmac.compare_digest(signature, _sign(key, ends, path, file)):
            raise RefusedRequestError(403, "this address has expired: ask for the addresses again")
        record = service.checkpoints.any(path)
        if record is None:
            raise RefusedRequestError(404, f"{path} was deleted")
        return FileResponse(Path(record.folder) / file)


def _sign(key: bytes, ends: int, path: str, file: str) -> str:
    return hmac.new(key, f"{ends}\n{path}\n{file}".encode(), hashlib.sha256).hexdigest()


def _path(model_id: str, kind: str, name: str) -> str:
    return f"{SCHEME}{model_id}/{kind}/{name}"


def _session(service: TrainingService, session: Session, tenant: str) -> dict[str, Any]:
    runs = [record.model_id for record in service.models(tenant) if record.session_id == session.session_id]
    return {
        "training_run_ids": runs,
        "sampler_ids": service.samplers.of_session(session.session_id),
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


def _run(service: TrainingService, record: ModelRecord) -> dict[str, Any]:
    newest = {checkpoint.kind: checkpoint for checkpoint in service.checkpoints.of_model(record.model_id)}
    last, last_sampler = newest.get(TRAINING), newest.get(SAMPLER)
    return {
        "training_run_id": record.model_id,
        "base_model": service.base.names[0],
        "model_owner": record.tenant,
        "is_lora": record.spec.is_adapter,
        "lora_rank": record.spec.lora_rank,
        "last_request_time": _time(service.last_request_s(record)),
        "last_checkpoint": None if last is None else _checkpoint(last),
        "last_sampler_checkpoint": None if last_sampler is None else _checkpoint(last_sampler),
        "user_metadata": record.user_metadata,
    }


def _checkpoint(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": TYPES[record.kind],
        "time": _time(record.created_s),
        "tinker_path": record.path,
        "size_bytes": record.num_bytes,
        "public": record.is_public,
        "user_metadata": record.user_metadata,
        "expires_at": None if record.expires_s is None else _time(record.expires_s),
    }


def _cursor(offset: int, limit: int, records: Sequence[object]) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(records)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
