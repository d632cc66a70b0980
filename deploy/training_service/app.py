"""The service as an ASGI application: sessions, training, sampling and futures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import tinker.types as tk
import zstandard
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from mobula.deploy.training_service.checkpoints import SaveRequest
from mobula.deploy.training_service.messages import parse_request, parsed
from mobula.deploy.training_service.rest import add_rest_routes
from mobula.deploy.training_service.service import TrainingService
from mobula.deploy.training_service.store import Kind, RequestOutcome, SamplingSession
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
    add_rest_routes(app, service)
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
