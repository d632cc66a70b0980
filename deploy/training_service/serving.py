"""`mobula serve-training`: learner ranks and engines of a configuration, and the service in front of them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from mobula.deploy.host.session import ray_session  # isort: skip  (first: sets what ray reads)
import ray

from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import PreflightError, ServiceFailedError
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import RolloutPool
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.placement_groups import create_placement_groups, plan_when_free
from mobula.cluster.serving import Address, run_server
from mobula.cluster.training_service.interfaces import AdapterEngines
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import file_access
from mobula.deploy.planning.clusters import joined_nodes
from mobula.deploy.planning.plan_command import planned_engine, refuse_too_small_cache
from mobula.deploy.preflight.findings import refusing
from mobula.deploy.training_service.app import make_app
from mobula.deploy.training_service.messages import ChatImages, InputBuilder
from mobula.deploy.training_service.service import BaseModel, TrainingService
from mobula.deploy.training_service.tenants import ServiceLimits, Tenants, tenant_gate
from mobula.deploy.wiring.preparation import Prepared, prepare_base, require_model
from mobula.deploy.wiring.roles import adapter_engines, rollout_pool, start_ranks, swapped_engines
from mobula.deploy.wiring.spawner import Spawner
from mobula.learner.adapters.group import AdapterGroup
from mobula.learner.adapters.ranks import AdapterRank, FullWeightsRank, refuse_unsupported

ANSWER_S = 3.0  # after a failure, before the server ends: clients learn that their requests have failed
GRACE_S = 2  # requests continue after a restart, so none is waited for
LOGS = "logs"

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running(learner: AdapterGroup, pool: RolloutPool) -> AsyncIterator[None]:
    """Runs learner ranks and engines. Raises: PreflightError: the configuration does not fit the model."""
    with refusing():
        await run_all(learner.start(), pool.start())
    try:
        async with pool.tended():
            yield
    finally:
        await learner.close()
        await pool.close()


def serve(
    config: RunConfig,
    address: Address,
    tenants: Tenants,
    folder: Path,
    model_name: str | None,
    announce: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT. `model_name` is a further name of the base model; `announce` receives the URL."""
    listener = address.listen(tenants, "--tenants")
    _refuse_unfit(config, tenants)
    require_model(config)
    if config.sampler.makes_images:
        raise PreflightError(f"sampler={config.sampler.kind} makes images, not text: use sampler=vllm or huggingface")
    refuse_too_small_cache(config)
    prepared = prepare_base(config, ray.put)
    with file_access(config, folder), cluster_spawner(prepared, folder / LOGS) as (prepared, spawner):
        service, roles = make_service(prepared, spawner, folder, model_name)
        service.on_failure = _end_soon
        tenants = replace(tenants, hosts=address.hosts)
        gate = tenant_gate(make_app(service, roles), tenants, service.limits.max_request_bytes)
        run_server(gate, listener, grace_s=GRACE_S, announce=announce)
    if service.failure is not None:
        raise ServiceFailedError(
            f"the training service has failed ({type(service.failure).__name__}: {service.failure}): the traceback is "
            f"above; start it again with --folder {folder}"
        )


def _refuse_unfit(config: RunConfig, tenants: Tenants) -> None:
    with refusing():
        refuse_unsupported(config)
    if config.training_service.weights != "full":
        return
    if len(tenants.tokens) > 1:
        raise PreflightError(
            f"training_service.weights=full serves one tenant, and --tenants names {len(tenants.tokens)}: leave "
            "training_service.weights out, or start a service for each tenant"
        )
    if config.sampler.adapters.are_on:
        raise PreflightError(
            f"sampler.adapters.max_served={config.sampler.adapters.max_served} freezes the weights of the engines, and "
            "training_service.weights=full changes them: leave sampler.adapters.max_served out"
        )


def _end_soon() -> None:
    """Ends the server after the clients that wait for results have their answers."""
    asyncio.get_running_loop().call_later(ANSWER_S, signal.raise_signal, signal.SIGTERM)


@contextmanager
def cluster_spawner(prepared: Prepared, logs: Path) -> Iterator[tuple[Prepared, Spawner]]:
    """Joins or starts a cluster and reserves the roles' resources while the body runs."""
    config = prepared.config
    with ray_session(config) as session:
        roles = ("learner", "rollout")
        plan = plan_when_free(config.resources, roles, wait_s=config.timeouts.stop_s)
        sized = replace(prepared, engine=planned_engine(config, joined_nodes(), roles))
        bookings = create_placement_groups(plan, run_name=config.name, timeout_s=config.timeouts.start_s)
        spawner = Spawner(config, session, plan, bookings, logs)
        try:
            yield sized, spawner
        finally:
            spawner.close()


def make_service(
    prepared: Prepared, spawner: Spawner, folder: Path, model_name: str | None
) -> tuple[TrainingService, Callable[[], AbstractAsyncContextManager[None]]]:
    config, chat = prepared.config, prepared.processor
    assert isinstance(chat, ChatProcessor), "only language models are served"
    in_flight = InFlightRequests(config.sampler.chunk_tokens)
    pool = rollout_pool(prepared, spawner, in_flight, on_lost=partial(logger.warning, "an engine was lost: %s"))
    on_retry = partial(logger.info, "sampling is tried again: %s")
    engines: AdapterEngines
    if config.training_service.weights == "full":
        engines = swapped_engines(prepared, pool, in_flight, on_retry)
    else:
        engines = adapter_engines(prepared, pool, in_flight, on_retry)
    rank = FullWeightsRank if config.training_service.weights == "full" else AdapterRank
    learner = AdapterGroup(partial(start_ranks, rank, "learner", config, spawner), config.timeouts, ray.put)
    images = ChatImages(chat, config.sampler.max_images_per_prompt) if chat.takes_images else None
    inputs = InputBuilder(images, num_embeddings=chat.num_embeddings, max_tokens=config.sampler.max_model_len)
    base_folder = str(prepared.model_folder.absolute())
    names = (config.policy.model, model_name, base_folder)
    base = BaseModel(tuple(dict.fromkeys(name for name in names if name)), base_folder, config.sampler.max_model_len)
    service = TrainingService(base, learner, engines, inputs, ServiceLimits.of(config), folder.absolute())
    return service, partial(running, learner, pool)
