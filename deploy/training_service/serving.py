"""`mobula serve-training`: learner ranks and engines of a configuration, and the service in front of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mobula.deploy.host.session import ray_session  # isort: skip  (first: sets what ray reads)
import ray

from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import PreflightError
from mobula.cluster.proxies import is_loopback
from mobula.cluster.records.media import MediaStore
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import RolloutPool
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.placement_groups import create_placement_groups, plan_when_free
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.nodes import joined_nodes
from mobula.deploy.planning.plan_command import planned_engine, refuse_too_small_cache
from mobula.deploy.preflight.checks import find_mismatches
from mobula.deploy.preflight.findings import refuse
from mobula.deploy.preflight.loaded import LoadedModel
from mobula.deploy.tools.http_server import Address, run_server
from mobula.deploy.training_service.app import make_app
from mobula.deploy.training_service.images import ChatImages
from mobula.deploy.training_service.limits import ServiceLimits
from mobula.deploy.training_service.service import BaseModel, TrainingService
from mobula.deploy.training_service.tenants import TenantGate, Tenants
from mobula.deploy.training_service.wire.inputs import InputBuilder
from mobula.deploy.wiring.preparation import Prepared, ensure_model, require_model
from mobula.deploy.wiring.rollouts import adapter_engines, rollout_pool
from mobula.deploy.wiring.spawner import Spawner, learner_environment
from mobula.learner.adapters.group import AdapterGroup
from mobula.learner.adapters.rank import AdapterRank
from mobula.learner.policies.checkpoint.stored import stored_model
from mobula.rewards.http.request_gate import RequestGate

ROLES = ("learner", "rollout")
READ_S = 120.0  # of the body of one request
GRACE_S = 2  # requests continue after a restart, so none is waited for
LOGS = "logs"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeTrainingOptions:
    """The options of `serve-training`."""

    host: str
    port: int
    tenants: Tenants
    folder: Path
    model_name: str | None


@dataclass(frozen=True)
class Roles:
    """Learner ranks and engines on the cluster. `running` starts and ends them."""

    learner: AdapterGroup
    pool: RolloutPool

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises: PreflightError: the configuration does not fit the model."""
        try:
            await run_all(self.learner.start(), self.pool.start())
        except ValueError as error:
            raise PreflightError(str(error)) from error
        try:
            async with self.pool.tended():
                yield
        finally:
            await self.learner.close()
            await self.pool.close()


def serve(config: RunConfig, options: ServeTrainingOptions, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `announce` receives the URL.

    Raises:
        PreflightError, ValueError: it cannot start; no role was started.
    """
    if not options.tenants.tokens and not is_loopback(options.host):
        raise PreflightError(
            f"--host {options.host} is reached from other machines, and there are no tokens: give --tenants, or "
            "listen on 127.0.0.1"
        )
    require_model(config)
    prepared = prepare_base(config)
    listener = Address(options.host, options.port, token="checked above").listen()
    with cluster_spawner(prepared, options.folder / LOGS) as (prepared, spawner):
        service, roles = make_service(prepared, spawner, options)
        app = RequestGate(
            make_app(service, roles.running),
            token=None,
            max_request_bytes=service.limits.max_request_bytes,
            read_s=READ_S,
            is_full=lambda: False,
            retry_after_s=1,
            on_status=lambda status: None,
        )
        run_server(TenantGate(app, options.tenants), listener, grace_s=GRACE_S, announce=announce)


def prepare_base(config: RunConfig) -> Prepared:
    """Returns the base model with its processor, checked. There are no data.

    Raises:
        PreflightError: the model cannot be served.
    """
    if config.sampler.is_flow or config.sampler.draws_tokens:
        raise PreflightError(f"sampler={config.sampler.kind} makes images, not text: use sampler=vllm or huggingface")
    refuse_too_small_cache(config)
    folder = ensure_model(config)
    media = MediaStore(ray.put, config.data.media_cache_bytes)
    chat = ChatProcessor.of(config, media)
    stored = stored_model(folder)
    checkpoint = stored.in_dtype(config.resources.dtype)
    refuse(find_mismatches(config, LoadedModel(folder, checkpoint, chat, stored)))
    return Prepared(config, folder, checkpoint, chat, media, {})


@contextmanager
def cluster_spawner(prepared: Prepared, logs: Path) -> Iterator[tuple[Prepared, Spawner]]:
    """Joins or starts a cluster and reserves the roles' resources while the body runs."""
    config = prepared.config
    with ray_session(config) as session:
        plan = plan_when_free(config.resources, ROLES, wait_s=config.timeouts.stop_s)
        sized = replace(prepared, engine=planned_engine(config, joined_nodes(), ROLES))
        bookings = create_placement_groups(plan, run_name=config.name, timeout_s=config.timeouts.start_s)
        spawner = Spawner(config, session, plan, bookings, logs)
        try:
            yield sized, spawner
        finally:
            spawner.close()


def make_service(prepared: Prepared, spawner: Spawner, options: ServeTrainingOptions) -> tuple[TrainingService, Roles]:
    """Returns the service and its roles, not started."""
    config, chat = prepared.config, prepared.processor
    assert isinstance(chat, ChatProcessor), "only language models are served"
    in_flight = InFlightRequests(config.sampler.chunk_tokens)
    pool = rollout_pool(prepared, spawner, in_flight, on_lost=partial(logger.warning, "an engine was lost: %s"))
    engines = adapter_engines(prepared, pool, in_flight, partial(logger.info, "sampling is tried again: %s"))
    learner = AdapterGroup(partial(_start_ranks, config, spawner), config.timeouts, ray.put)
    images = ChatImages(chat) if chat.takes_images else None
    inputs = InputBuilder(images, num_embeddings=chat.num_embeddings, max_tokens=config.sampler.max_model_len)
    folder = str(prepared.model_folder.absolute())
    names = (config.policy.model, options.model_name, folder)
    base = BaseModel(tuple(dict.fromkeys(name for name in names if name)), folder, config.sampler.max_model_len)
    service = TrainingService(base, learner, engines, inputs, limits_of(config), options.folder.absolute())
    return service, Roles(learner, pool)


def limits_of(config: RunConfig) -> ServiceLimits:
    """Returns the bounds that a configuration sets."""
    own, timeouts, adapters = config.training_service, config.timeouts, config.sampler.adapters
    return ServiceLimits(
        max_models=own.max_models,
        max_rank=adapters.max_rank,
        max_rows=own.max_rows,
        max_tokens=own.max_tokens,
        max_batch_tokens=own.max_batch_tokens,
        max_queued=own.max_queued,
        max_samples=own.max_samples,
        max_request_bytes=own.max_request_bytes,
        max_served=adapters.max_served,
        snapshot_steps=own.snapshot_steps,
        learner_s=timeouts.start_s + timeouts.update_s,  # ranks that were lost start again within a call
        sample_s=own.recovery_s + timeouts.rollout_s,
        recovery_s=own.recovery_s,
        poll_s=own.poll_s,
        session_idle_s=own.session_idle_s,
    )


def _start_ranks(config: RunConfig, spawner: Spawner) -> list[Any]:
    ranks = spawner.book_together("learner")
    env = learner_environment(config)
    return [spawner.start(AdapterRank, config, w.index, len(ranks), worker=w, env=env) for w in ranks]
