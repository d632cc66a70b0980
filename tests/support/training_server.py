"""A training service with tiny roles on loopback: in a thread, or as a process that can be killed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import http_servers
import uvicorn
from training_roles import VOCABULARY, TinyEngines, TinyLearner

from mobula.deploy.training_service.app import make_app
from mobula.deploy.training_service.messages import InputBuilder
from mobula.deploy.training_service.service import BaseModel, TrainingService
from mobula.deploy.training_service.tenants import ServiceLimits, Tenants, tenant_gate

NAME = "tiny/base"
LIMITS = ServiceLimits(
    max_models=8, max_rank=64, max_rows=64, max_tokens=4096, max_batch_tokens=2048, max_queued=64, max_samples=256,
    max_request_bytes=1 << 24, max_dense_values=1 << 16, max_served=2, alpha=32.0, kept_results=8, kept_results_s=600,
    kept_in_memory=64, snapshot_steps=3, learner_s=20, sample_s=30, recovery_s=30, poll_s=5, session_idle_s=600,
)  # fmt: skip


@dataclass
class Running:
    """A service that runs in a thread."""

    url: str
    service: TrainingService
    learner: TinyLearner
    engines: TinyEngines


def make_service(folder: Path, learner: TinyLearner, engines: TinyEngines, **limits: float) -> TrainingService:
    """Returns a service of tiny roles."""
    bounds = LIMITS.model_copy(update=limits)
    inputs = InputBuilder(None, num_embeddings=VOCABULARY, max_tokens=128)
    base = BaseModel((NAME,), "tokenizer", 128)
    return TrainingService(base, learner, engines, inputs, bounds, folder)


@contextlib.contextmanager
def running(folder: Path, tokens: Mapping[str, str] | None = None, port: int = 0, **limits: float) -> Iterator[Running]:
    """Runs a service in a thread until the end of the block."""
    learner, engines = TinyLearner(), TinyEngines()
    service = make_service(folder, learner, engines, **limits)
    app = tenant_gate(make_app(service), Tenants(tokens or {}), LIMITS.max_request_bytes)
    server = http_servers.Running(app, port, grace_s=1)
    try:
        yield Running(server.url, service, learner, engines)
    finally:
        server.stop()


def main() -> None:
    """Serves in this process: FOLDER PORT DELAY_S."""
    folder, port, delay_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    learner, engines = TinyLearner(delay_s=delay_s), TinyEngines(delay_s=delay_s)
    service = make_service(folder, learner, engines)
    app = tenant_gate(make_app(service), Tenants({}), LIMITS.max_request_bytes)
    uvicorn.run(app, port=port, log_level="warning")


if __name__ == "__main__":
    main()
