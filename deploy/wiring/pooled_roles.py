"""Pools of roles and their scaling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mobula.actors.processors.pool import ProcessorPool
from mobula.actors.processors.worker import ProcessorWorker
from mobula.actors.reference.pool import NullReference, ReferencePool
from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.controller import GroupQueue
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import STARTING, Metrics
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.runtime.object_store import object_store_use
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.cluster.runtime.ray_actors import stop
from mobula.cluster.workers.control import CONTROL, ControlLoop, ControlPanel
from mobula.cluster.workers.status import RestartPolicy, Scalable, WorkerState, WorkerStatus
from mobula.cluster.workers.supervisor import Watched, watched_pool
from mobula.configs.schema import ResourcesConfig, RunConfig
from mobula.configs.schema.resources import REWARD_SERVICE
from mobula.configs.schema.rewards import SHARED_SERVICE
from mobula.deploy.wiring.preparation import PreparedJob
from mobula.deploy.wiring.spawner import BOOKING_S, Spawner
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool
from mobula.rewards.pool.service import RewardService, ServiceSettings
from mobula.rewards.pool.worker import RewardWorker

SCALE_FILE = "scale.json"  # in the run folder


VISIT_INTERVAL_S = 1.0


VISIT_DEADLINE_S = 20.0  # of one call to the panel


class RoleHosts:
    """Implements `mobula.cluster.workers.work_queue.Hosts`: workers of one role, each with a separate reservation."""

    def __init__(self, spawner: Spawner, role: str, start: Callable[[PlacedWorker], Any], *, stop_s: float) -> None:
        """`start` creates the worker at a place and returns its handle."""
        self._spawner = spawner
        self._role = role
        self._start = start
        self._stop_s = stop_s

    async def start(self, index: int) -> Any:
        return self._start(await asyncio.to_thread(self._spawner.book, self._role, index))

    async def stop(self, index: int, handle: Any) -> None:
        await stop(handle, timeout_s=self._stop_s, what=f"{self._role}/{index}")

    async def release(self, index: int) -> None:
        await asyncio.to_thread(self._spawner.release, self._role, index)


class ScaleFile:
    """Keeps the requested numbers of workers in the run folder for a resume."""

    def __init__(self, folder: Path, resources: ResourcesConfig) -> None:
        self._path = folder / SCALE_FILE
        self._configured = {role: workers.num_workers for role, workers in resources.roles.items()}

    def note(self, role: str, num_workers: int) -> None:
        """Records the number that a role accepted."""
        row = {"num_workers": num_workers, "configured": self._configured[role]}
        write_atomically(self._path, json.dumps({**self._read(), role: row}, indent=1))

    def earlier(self) -> dict[str, int]:
        """Returns role -> workers where it differs from the configuration. A number configured after the scaling takes
        precedence.
        """
        rows = {role: row for role, row in self._read().items() if role in self._configured}
        return {
            role: row["num_workers"]
            for role, row in rows.items()
            if row["configured"] == self._configured[role] != row["num_workers"]
        }

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}


class RoomFirst:
    """A scalable role that checks the cluster's free resources before it grows."""

    def __init__(self, role: str, workers: Scalable, check_room: Callable[[str, int], None]) -> None:
        """`check_room(role, num_more)` raises a `PlacementError`; it may block."""
        self._role = role
        self._workers = workers
        self._check_room = check_room

    def status(self) -> Sequence[WorkerStatus]:
        return self._workers.status()

    async def scale(self, num_workers: int) -> None:
        """Sets the target number of workers."""
        staying = sum(worker.state is not WorkerState.DRAINING for worker in self.status())
        if num_workers > staying:
            await asyncio.to_thread(self._check_room, self._role, num_workers - staying)
        await self._workers.scale(num_workers)


def control_loop(
    config: RunConfig,
    spawner: Spawner,
    roles: Mapping[str, Scalable],
    in_flight_requests: InFlightRequests,
    replay: GroupQueue,
    metrics: Metrics,
    ranks: Callable[[], Sequence[WorkerStatus]],
) -> ControlLoop:
    """Answers `mobula status` and `mobula scale` for this run; `ranks` lists workers that cannot be scaled."""
    stop_s, scale_file = config.timeouts.stop_s, ScaleFile(config.run_folder, config.resources)
    return ControlLoop(
        config.name,
        config.num_steps,
        spawn_panel=partial(spawner.start_named, ControlPanel, CONTROL),
        end_panel=lambda panel: stop(panel, timeout_s=stop_s, what="the control panel"),
        progress=metrics.progress,
        in_flight=in_flight_requests.summary,
        replay=replay.stats,
        roles={role: RoomFirst(role, workers, spawner.check_room) for role, workers in roles.items()},
        ranks=ranks,
        object_store=object_store_use,
        earlier_scale=scale_file.earlier(),
        has_begun=lambda: metrics.progress().phase != STARTING,
        on_scaled=scale_file.note,
        on_panel_lost=lambda kind: metrics.count(CounterName.RESTARTS, f"control_{kind}"),
        on_status=metrics.post,
        interval_s=VISIT_INTERVAL_S,
        start_s=config.timeouts.start_s,
        deadline_s=VISIT_DEADLINE_S,
        scale_s=BOOKING_S,
    )


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
