"""The service as an ASGI application: sessions, training, sampling and futures; listings, checkpoints and files."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tinker.types as tk
import zstandard
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from mobula.deploy.training_service.checkpoints import EXTERNAL, SAMPLER, SCHEME, TRAINING, SaveRequest, expiry
from mobula.deploy.training_service.messages import TtlBody, WeightsBody, parse_request, parsed
from mobula.deploy.training_service.service import TrainingService
from mobula.deploy.training_service.store import (
    CheckpointRecord,
    CopyRecord,
    Kind,
    ModelRecord,
    RequestOutcome,
    SamplingSession,
)
from mobula.deploy.training_service.tenants import RefusedRequestError, RequestError, tenant_of

PROTO = "application/x-protobuf"
PARSED_AT_ONCE = 1 << 18  # bytes, parsed in less than a millisecond
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
Numbered = tk.OptimStepRequest | SaveRequest
QUEUED: Mapping[str, tuple[Kind, type[Numbered]]] = {  # requests of a model that need no further check
    "/api/v1/optim_step": (Kind.STEP, tk.OptimStepRequest),
    "/api/v1/save_weights": (Kind.SAVE, tk.SaveWeightsRequest),
    "/api/v1/save_weights_for_sampler": (Kind.SAVE_SAMPLER, tk.SaveWeightsForSamplerRequest),
    "/api/v1/save_weights_external": (Kind.SAVE_EXTERNAL, tk.SaveWeightsExternalRequest),
}


def make_app(service: TrainingService, roles: Callable[[], AbstractAsyncContextManager[None]] = nullcontext) -> FastAPI:
    """Returns the application. It starts and stops the service with itself, and `roles` around it."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        async with roles():
            await service.start()
            try:
                yield
            finally:
                await service.close()

    app = FastAPI(title="Mobula training service", lifespan=life, docs_url=None, redoc_url=None)

    @app.exception_handler(RefusedRequestError)
    async def refused(_: Request, error: RefusedRequestError) -> Response:
        return JSONResponse({"detail": str(error)}, status_code=error.status)

    @app.exception_handler(RequestError)
    async def unfit(_: Request, error: RequestError) -> Response:
        return JSONResponse({"detail": str(error)}, status_code=422)

    @app.get("/api/v1/healthz")
    @app.get("/health")
    async def health() -> Response:
        if service.failure is not None:
            return JSONResponse({"detail": f"the training service has failed: {service.failure!r}"}, status_code=503)
        return JSONResponse({"status": "ok"})

    _add_sessions(app, service)
    _add_training(app, service)
    _add_sampling(app, service)
    _add_futures(app, service)
    _add_listings(app, service)
    _add_checkpoints(app, service)
    _add_files(app, service)
    return app


def _add_sessions(app: FastAPI, service: TrainingService) -> None:
    @app.post("/api/v1/client/config")
    async def client_config() -> Response:
        most = service.limits
        sizes = {"fwdbwd_max_chunk_len": most.max_rows, "fwdbwd_max_chunk_bytes_count": most.max_request_bytes // 4}
        return JSONResponse({**CLIENT_CONFIG, **sizes, "sample_max_concurrent_requests": most.max_samples})

    @app.post("/api/v1/client/dynamic_config")
    async def client_dynamic_config() -> Response:
        return JSONResponse(DYNAMIC_CONFIG)

    @app.post("/api/v1/create_session")
    async def create_session(request: Request) -> Response:
        message = parsed(tk.CreateSessionRequest, await request.body())
        session = await service.create_session(tenant_of(request), message.user_metadata, message.display_name)
        return JSONResponse({"type": "create_session", "session_id": session.session_id})

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        message = parsed(tk.SessionHeartbeatRequest, await request.body())
        service.heartbeat(message.session_id, tenant_of(request))
        return JSONResponse({"type": "session_heartbeat"})

    @app.post("/api/v1/sessions/{session_id}/finish")
    async def finish(session_id: str, request: Request) -> Response:
        await service.finish_session(session_id, tenant_of(request))
        return JSONResponse({})

    @app.post("/api/v1/telemetry")
    async def telemetry() -> Response:
        return JSONResponse({"status": "accepted"})

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> Response:
        base = service.base
        facts = {"max_context_length": base.max_tokens, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{"model_name": name, **facts} for name in base.names]})


def _add_training(app: FastAPI, service: TrainingService) -> None:
    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> Response:
        body = await request.body()
        message = parsed(tk.CreateModelRequest, body)
        return _accepted(await service.create_model(message, body, tenant_of(request)))

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> Response:
        message = parsed(tk.GetInfoRequest, await request.body())
        record = service.model(message.model_id, tenant_of(request))
        name, is_lora = service.base.names[0], record.spec.is_adapter
        arch = "lora" if is_lora else "full"
        model_data = {"arch": arch, "model_name": name, "tokenizer_id": service.base.tokenizer_id}
        lora = {"is_lora": is_lora, "lora_rank": record.spec.lora_rank}
        info = {"type": "get_info", "model_data": model_data, "model_id": record.model_id, "model_name": name, **lora}
        return JSONResponse(info)

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Response:
        body = await _training_body(request, service.limits.max_request_bytes)
        is_large = len(body) > PARSED_AT_ONCE  # a thread costs more than parsing a small message
        message = await asyncio.to_thread(parse_request, body) if is_large else parse_request(body)
        kind = Kind.FORWARD if message.forward_only else Kind.FORWARD_BACKWARD
        return _accepted(await service.submit(kind, message.model_id, message.seq_id, body, tenant_of(request)))

    @app.post("/api/v1/load_weights")
    async def load_weights(request: Request) -> Response:
        body = await request.body()
        message = parsed(tk.LoadWeightsRequest, body)
        tenant = tenant_of(request)
        if message.model_id is not None:
            return _accepted(await service.submit(Kind.LOAD, message.model_id, message.seq_id, body, tenant))
        if message.session_id is None or message.model_seq_id is None:
            raise RefusedRequestError(400, "load_weights needs model_id, or session_id and model_seq_id")
        return _accepted(await service.create_from(message, body, tenant))

    async def queued(request: Request) -> Response:
        (kind, model), body = QUEUED[request.url.path], await request.body()
        message = parsed(model, body)
        return _accepted(await service.submit(kind, message.model_id, message.seq_id, body, tenant_of(request)))

    for path in QUEUED:
        app.post(path)(queued)

    @app.post("/api/v1/unload_model")
    async def unload_model(request: Request) -> Response:
        message = parsed(tk.UnloadModelRequest, await request.body())
        await service.unload(message.model_id, tenant_of(request))
        return JSONResponse({"type": "unload_model", "model_id": message.model_id})

    @app.post("/api/v1/create_custom_loss")
    async def create_custom_loss() -> Response:
        raise RefusedRequestError(
            400, "the server runs no custom losses: forward_backward_custom runs them in the client"
        )


def _add_sampling(app: FastAPI, service: TrainingService) -> None:
    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> Response:
        message = parsed(tk.CreateSamplingSessionRequest, await request.body())
        tenant = tenant_of(request)
        session = service.session(message.session_id, tenant)
        if message.base_model is not None:
            service.check_base(message.base_model)
        if message.model_path is not None:
            service.samplers.check_path(message.model_path, tenant)
        sampler_id = f"{session.session_id}:sample:{message.sampling_session_seq_id}"
        await service.samplers.put(SamplingSession(sampler_id, tenant, session.session_id, message.model_path))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    @app.post("/api/v1/join_sampling_session")
    async def join_sampling_session(request: Request) -> Response:
        message = parsed(tk.JoinSamplingSessionRequest, await request.body())
        counter = await service.samplers.join(message.sampling_session_id, tenant_of(request))
        return JSONResponse({"type": "join_sampling_session", "client_counter": counter})

    @app.get("/api/v1/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str, request: Request) -> Response:
        sampler = service.samplers.get(sampler_id, tenant_of(request))
        names = {"sampler_id": sampler_id, "base_model": service.base.names[0], "model_path": sampler.path}
        return JSONResponse(names)

    @app.post("/api/v1/asample")
    async def asample(request: Request) -> Response:
        service.check_running()
        request_id, ids = await service.samplers.submit(await request.body(), tenant_of(request))
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": ids})

    @app.post("/api/v1/cancel_future")
    async def cancel_future(request: Request) -> Response:
        request_id = parsed(tk.FutureRetrieveRequest, await request.body()).request_id
        service.check_owner(request_id, tenant_of(request))
        service.samplers.cancel(request_id)
        return Response(status_code=204)


def _add_futures(app: FastAPI, service: TrainingService) -> None:
    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        message = parsed(tk.FutureRetrieveRequest, await request.body())
        outcome = await service.outcome(message.request_id, tenant_of(request))
        if outcome is None:
            waiting = {"type": "try_again", "request_id": message.request_id, "queue_state": "active"}
            return JSONResponse(waiting, status_code=408)
        return _answer(outcome)

    @app.post("/api/v1/retrieve_futures")
    async def retrieve_futures(request: Request) -> Response:
        message = parsed(tk.FuturesRetrieveRequest, await request.body())
        target, tenant = message.target, tenant_of(request)
        service.samplers.get(target.sampling_session_id, tenant)
        own = [i for i in message.retrieved_request_ids if i.startswith(f"sample-{target.sampling_session_id}:")]
        await service.samplers.retrieved(own)
        wait_s = service.limits.poll_s if message.timeout is None else min(message.timeout, service.limits.poll_s)
        completions, cursor = await service.samplers.completions(
            target.sampling_session_id, target.cloned_sampler_id, message.prev_cursor, wait_s
        )
        return JSONResponse({"completions": completions, "cursor": cursor})


def _accepted(request_id: str) -> Response:
    return JSONResponse({"request_id": request_id, "model_id": request_id.rpartition(":")[0]})


def _answer(outcome: RequestOutcome) -> Response:
    """Returns the outcome as the client reads it; a failed one is answered with 200 and its category."""
    if outcome.is_failed:
        return JSONResponse({"error": outcome.error, "category": outcome.category})
    return Response(outcome.body, media_type=PROTO if outcome.is_proto else "application/json")


async def _training_body(request: Request, max_bytes: int) -> bytes:
    body = await request.body()
    if request.headers.get("content-encoding") != "zstd":
        return body
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain = await asyncio.to_thread(reader.read, max_bytes + 1)
    except zstandard.ZstdError as error:
        raise RefusedRequestError(400, f"the zstd body is damaged: {error}") from error
    if len(plain) > max_bytes:
        raise RefusedRequestError(413, f"the body has more than {max_bytes} bytes: send fewer rows")
    return plain


TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
URL_LIFE_S = 3600
CHECKPOINT = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"


def _add_listings(app: FastAPI, service: TrainingService) -> None:
    @app.get("/api/v1/sessions")
    async def list_sessions(request: Request, limit: int = 20, offset: int = 0) -> Response:
        ids = [session.session_id for session in service.sessions(tenant_of(request))]
        return JSONResponse({"sessions": ids[offset : offset + limit]})

    @app.get("/api/v1/sessions/{session_id}")
    async def get_session(session_id: str, request: Request) -> Response:
        tenant = tenant_of(request)
        session = service.session(session_id, tenant)
        content = {
            "training_run_ids": [run.model_id for run in service.models(tenant) if run.session_id == session_id],
            "sampler_ids": service.samplers.of_session(session_id),
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }
        return JSONResponse(content)

    @app.get("/api/v1/whoami")
    async def whoami(request: Request) -> Response:
        return JSONResponse({"user_urn": f"tenant:{tenant_of(request)}", "org_urn": "mobula"})

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
