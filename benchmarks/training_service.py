"""Overhead of the training service: seconds of a call over HTTP with a learner that computes nothing.

A call is a request and the question for its result, as the client sends them: `forward_backward` of 8 rows of 128
tokens and `optim_step`, in turn. The service runs in a separate process. The other side calls the learner in the
process of the client. Every request is on disk before it is acknowledged, so the disk is a part of the overhead.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
import tinker.types as tk
import uvicorn
from tinker.proto.request_conv import forward_backward_request_to_proto

from benchmarks.harness.apart import apart
from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, interleave
from mobula.cluster.serving import Address
from mobula.cluster.training_service.interfaces import (
    AdamParameters,
    AdapterSpec,
    LossCall,
    LossResult,
    SampleCall,
    SampleResult,
)
from mobula.configs.load import load_config
from mobula.deploy.training_service.app import make_app
from mobula.deploy.training_service.messages import InputBuilder, read_call
from mobula.deploy.training_service.service import BaseModel, TrainingService
from mobula.deploy.training_service.tenants import ServiceLimits, Tenants, tenant_gate

NUM_CALLS, QUICK_CALLS = 400, 40
NUM_ROWS, NUM_TOKENS, VOCABULARY = 8, 128, 1000
MODEL = "base"
TARGET_S = 0.005
PROTO = {"Content-Type": "application/x-protobuf"}
UNIT = "calls/s"
ADAM = tk.AdamParams()


class IdleLearner:
    """Implements `AdapterLearner` and computes nothing."""

    async def create(self, adapter: str, spec: AdapterSpec) -> None: ...

    async def compute(self, calls: Sequence[LossCall]) -> list[LossResult | Exception]:
        return [
            LossResult(
                [{"logprobs": np.zeros(row.prompt.num_tokens, dtype=np.float32)} for row in call.rows], {"loss": 0}
            )
            for call in calls
        ]

    async def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        return {}

    async def save(self, adapter: str, folder: Path) -> None:
        (folder / "state").write_bytes(b"state")

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None: ...

    async def export(self, adapter: str, folder: Path) -> None: ...

    async def drop(self, adapter: str) -> None: ...


class NoEngines:
    """Implements `AdapterEngines` and serves nothing."""

    async def serve(self, adapter: str, folder: Path) -> None: ...

    async def withdraw(self, adapter: str) -> None: ...

    async def sample(self, call: SampleCall) -> SampleResult:
        raise ValueError("there are no engines")


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Both ways of the same calls; the overrides say nothing here."""
    num_calls = QUICK_CALLS if effort == QUICK else NUM_CALLS
    with tempfile.TemporaryDirectory(prefix="mobula-") as folder, apart(_Served, Path(folder), env={}) as peer:
        bench = _Bench(peer.ask(None), num_calls)
        sides = {"over_http": bench.over_http, "in_process": bench.in_process}
        found = asyncio.run(interleave(sides, effort))
        bench.close()
    served = Measurements("over HTTP, requests on disk", UNIT, found["over_http"])
    direct = Measurements("the learner in the process", UNIT, found["in_process"])
    overhead_s = 1 / served.median - 1 / direct.median
    return Findings(
        settings={"num_calls": num_calls, "num_rows": NUM_ROWS, "num_tokens": NUM_TOKENS},
        series={"over_http": served, "in_process": direct},
        claims=(Claim(f"overhead of a call, in units of {1000 * TARGET_S:g} ms", overhead_s / TARGET_S, 1.0, False),),
    )


class _Bench:
    """The same calls by both ways."""

    def __init__(self, url: str, num_calls: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)
        self._num_calls = num_calls
        self._inputs, self._limits = _inputs(), _limits()
        session = self._post("/api/v1/create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"})
        self._session_id = session["session_id"]
        self._num_models = 0

    async def over_http(self, _: int) -> float:
        return await asyncio.to_thread(self._calls)

    async def in_process(self, _: int) -> float:
        learner = IdleLearner()
        started = time.perf_counter()
        for seq_id in range(1, self._num_calls, 2):
            await learner.compute([read_call(_forward("model", seq_id), self._inputs, self._limits)])
            await learner.step("model", AdamParameters(**ADAM.model_dump()))
        return self._num_calls / (time.perf_counter() - started)

    def close(self) -> None:
        self._client.close()

    def _calls(self) -> float:
        model = {"session_id": self._session_id, "model_seq_id": self._num_models, "base_model": MODEL}
        self._num_models += 1
        future = self._post("/api/v1/create_model", {**model, "lora_config": {"rank": 8}})
        self._result(future["request_id"])
        model_id = future["model_id"]
        started = time.perf_counter()
        for seq_id in range(1, self._num_calls, 2):
            body = _forward(model_id, seq_id)
            answer = (
                self._client.post("/api/v1/forward_backward", content=body, headers=PROTO).raise_for_status().json()
            )
            self._result(answer["request_id"])
            step = {"model_id": model_id, "seq_id": seq_id + 1, "adam_params": ADAM.model_dump()}
            self._result(self._post("/api/v1/optim_step", step)["request_id"])
        return self._num_calls / (time.perf_counter() - started)

    def _result(self, request_id: str) -> None:
        answer = self._client.post("/api/v1/retrieve_future", json={"request_id": request_id}).raise_for_status()
        if answer.headers["content-type"] == "application/json" and "error" in answer.json():
            raise RuntimeError(answer.text)

    def _post(self, path: str, body: Mapping[str, object]) -> dict[str, str]:
        answer: dict[str, str] = self._client.post(path, json=body).raise_for_status().json()
        return answer


def _forward(model_id: str, seq_id: int) -> bytes:
    """Returns the message of a `forward_backward` request."""
    tokens = np.arange(NUM_TOKENS) + seq_id % (VOCABULARY - NUM_TOKENS)
    inputs = {"target_tokens": tokens, "weights": np.ones(NUM_TOKENS, dtype=np.float32)}
    row = tk.Datum(model_input=tk.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs)
    request = tk.ForwardBackwardRequest(
        forward_backward_input=tk.ForwardBackwardInput(data=[row] * NUM_ROWS, loss_fn="cross_entropy"),
        model_id=model_id,
        seq_id=seq_id,
    )
    body: bytes = forward_backward_request_to_proto(request).SerializeToString()
    return body


class _Served:
    """A service in this process. It answers with its URL."""

    def __init__(self, folder: Path) -> None:
        service = TrainingService(
            BaseModel((MODEL,), MODEL, NUM_TOKENS), IdleLearner(), NoEngines(), _inputs(), _limits(), folder
        )
        listener = Address("127.0.0.1", 0, token=None).listen()
        self._port = listener.getsockname()[1]
        app = tenant_gate(make_app(service), Tenants({}), service.limits.max_request_bytes)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        threading.Thread(target=server.run, args=([listener],), daemon=True).start()

    def __call__(self, _: None) -> str:
        return f"http://127.0.0.1:{self._port}"


def _inputs() -> InputBuilder:
    return InputBuilder(None, num_embeddings=VOCABULARY, max_tokens=NUM_TOKENS)


def _limits() -> ServiceLimits:
    return ServiceLimits.of(load_config(["training_service.max_models=1000"], is_complete=False))
