"""Builds the worker pools of a run: processor workers, reward workers and reference scorers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mobula.actors.processors.pool import ProcessorPool
from mobula.actors.processors.worker import ProcessorWorker
from mobula.actors.reference.pool import NullReference, ReferencePool
from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.cluster.workers.restart_policy import RestartPolicy
from mobula.cluster.workers.status import Scalable
from mobula.cluster.workers.supervisor import Watched, watched_pool
from mobula.configs.schema import RunConfig
from mobula.configs.schema.resources import REWARD_SERVICE
from mobula.configs.schema.rewards import SHARED_SERVICE
from mobula.deploy.wiring.preparation import PreparedJob
from mobula.deploy.wiring.scaling import RoleHosts
from mobula.deploy.wiring.spawner import Spawner
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool
from mobula.rewards.pool.service import RewardService, ServiceSettings
from mobula.rewards.pool.worker import RewardWorker

AnyJob = TypeVar("AnyJob", bound=PreparedJob[Any, Any])
PROCESSOR = "processor"  # the role
REFERENCE_FOLDER = "reference"  # in the run folder: the frozen policy, in the Hugging Face layout


def reference_folder(config: RunConfig) -> Path:
    """Returns the folder of a run's frozen policy, in the Hugging Face layout."""
    return config.run_folder / REFERENCE_FOLDER


def restart_policy(config: RunConfig) -> RestartPolicy:
    """Returns the restart limits of a worker."""
    supervision = config.supervision
    return RestartPolicy(
        max_restarts=supervision.max_restarts,
        window_s=supervision.restart_window_s,
        backoff_s=supervision.backoff_s,
        max_backoff_s=supervision.max_backoff_s,
    )


@dataclass(frozen=True)
class Processors:
    """The processor workers of a run, if any."""

    start: Callable[[], Coroutine[Any, Any, None]]  # returns when the workers serve
    watched: tuple[Watched, ...] = ()
    scalable: Mapping[str, Scalable] = field(default_factory=dict)  # by the name of the role


def spawn_processors(prepared: AnyJob, spawner: Spawner, on_lost: Callable[[str], None]) -> tuple[AnyJob, Processors]:
    """Starts the workers of `resources.processor`, which load in the background. Without workers the driver prepares
    prompts. Returns `prepared` with this choice, and the workers. Call it in the event loop of the pool.

    `on_lost` receives the kind of each loss.
    """
    config = prepared.config

    def start(worker: PlacedWorker) -> Any:
        return spawner.start(ProcessorWorker, config, worker=worker)

    workers = [start(worker) for worker in spawner.workers(PROCESSOR)]
    if not workers:
        return prepared, Processors(_nothing)
    timeouts = config.timeouts
    pool = ProcessorPool(
        workers,
        prepared.media,
        prepared.processor.num_media,
        hosts=RoleHosts(spawner, PROCESSOR, start, stop_s=timeouts.stop_s),
        restarts=restart_policy(config),
        start_s=timeouts.start_s,
        alive_s=_alive_s(config),
        timeout_s=timeouts.prepare_s + (config.data.download_timeout_s if config.data.allowed_hosts else 0.0),
        object_s=timeouts.object_s,
        on_lost=on_lost,
    )
    watched = watched_pool(PROCESSOR, pool.pool.check, pool.pool.close)
    return replace(prepared, workers=pool), Processors(pool.start, (watched,), {PROCESSOR: pool.pool})


async def _nothing() -> None:
    """Returns immediately: there are no workers."""


def reward_pool(config: RunConfig, spawner: Spawner, on_lost: Callable[[str], None] = lambda kind: None) -> RewardPool:
    """Starts the reward workers of every service, which load in the background.

    `on_lost` receives the kind of each loss.

    Raises:
        ValueError: gates form a cycle between services.
    """
    losses = LossCounter(on_lost)
    services = {name: _reward_service(config, spawner, name, losses) for name in config.rewards.services}
    return RewardPool(config.rewards, services, losses)


def reward_role(service: str) -> str:
    """Returns the role of the workers that run a service's components."""
    return service if service == SHARED_SERVICE else f"{REWARD_SERVICE}{service}"


def _reward_service(config: RunConfig, spawner: Spawner, name: str, losses: LossCounter) -> RewardService:
    role, start = reward_role(name), partial(_start_reward, config, spawner, name)
    timeouts, pool = config.timeouts, config.rewards.pool
    return RewardService(
        role,
        [start(worker) for worker in spawner.workers(role)],
        hosts=RoleHosts(spawner, role, start, stop_s=timeouts.stop_s),
        restarts=restart_policy(config),
        settings=ServiceSettings(
            start_s=timeouts.start_s,
            alive_s=_alive_s(config),
            timeout_s=timeouts.start_s + pool.batches_in_flight * pool.max_batch_groups * timeouts.reward_s,
            max_batch=pool.max_batch_groups,
            max_in_flight=pool.batches_in_flight,
            max_queued=pool.max_queued_groups,
            max_attempts=config.max_rollout_retries + 1,
        ),
        on_lost=losses.count_loss,
    )


def reference_pool(
    config: RunConfig,
    spawner: Spawner,
    frozen: Path,
    banned: tuple[int, ...],
    *,
    teachers: Mapping[str, Path],
    on_lost: Callable[[str], None],
    on_retry: Callable[[str], None],
) -> ReferencePool | NullReference:
    """Starts scorers of the checkpoint in the folder `frozen`, which never sample a `banned` id. Returns a null object
    if the run needs no scorers. The folder may be written later, before scorers load it. Rows with a label in
    `teachers` are scored with that label's checkpoint.

    `on_lost` receives the kind of each loss, `on_retry` the reason for each retry of a share of a step.
    """
    timeouts = config.timeouts

    def start(worker: PlacedWorker) -> Any:
        return spawner.start(ReferenceScorer, config, banned, teachers, worker=worker)

    scorers = [start(worker) for worker in spawner.workers("reference")]
    if not scorers:
        return NullReference()
    return ReferencePool(
        scorers,
        frozen,
        hosts=RoleHosts(spawner, "reference", start, stop_s=timeouts.stop_s),
        restarts=restart_policy(config),
        alive_s=_alive_s(config),
        timeout_s=timeouts.reference_s,
        max_attempts=config.max_rollout_retries + 1,
        on_lost=on_lost,
        on_retry=on_retry,
    )


def _start_reward(config: RunConfig, spawner: Spawner, service: str, worker: PlacedWorker) -> Any:
    timeouts = config.timeouts
    return spawner.start(
        RewardWorker,
        config.rewards,
        service,
        object_timeout_s=timeouts.object_s,
        start_timeout_s=timeouts.start_s,
        function_timeout_s=timeouts.reward_s / 4,
        group_timeout_s=timeouts.reward_s,
        device="cuda" if worker.num_gpus else "cpu",  # without a reserved GPU the worker sees no GPU
        dtype=config.resources.dtype,
        gpu_share=min(1.0, worker.num_gpus or 1.0),
        worker=worker,
    )


def _alive_s(config: RunConfig) -> float:
    """Returns a ping timeout below the supervisor's, so that the pool replaces a silent worker first."""
    return config.supervision.sign_timeout_s / 2
