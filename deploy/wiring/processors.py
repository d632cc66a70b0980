"""Processor workers, or the driver in their place: where a run's prompts are prepared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from actors.processors.pool import ProcessorPool
from actors.processors.worker import ProcessorWorker
from cluster.runtime.placement import PlacedWorker
from cluster.workers.status import Scalable
from cluster.workers.supervisor import Watched, watched_pool
from deploy.wiring.preparation import Prepared
from deploy.wiring.scaling import RoleHosts
from deploy.wiring.scoring_roles import alive_s, restart_policy
from deploy.wiring.spawner import Spawner

ROLE = "processor"


@dataclass(frozen=True)
class Processors:
    """`prepared`, whose prompts are prepared where the run has chosen, and the workers that do it."""

    prepared: Prepared
    start: Callable[[], Awaitable[None]]  # returns once they serve
    watched: tuple[Watched, ...] = ()
    scalable: Mapping[str, Scalable] = field(default_factory=dict)  # by the name of the role


def spawn_processors(prepared: Prepared, spawner: Spawner, on_lost: Callable[[str], None]) -> Processors:
    """Start the workers of `resources.processor`, which build themselves in the background; without any the driver
    prepares prompts. Called in the event loop that the pool is to live in.

    `on_lost` receives the kind of each loss.
    """
    config = prepared.config

    def start(worker: PlacedWorker) -> Any:
        return spawner.start(ProcessorWorker, config, worker=worker)

    workers = [start(worker) for worker in spawner.workers(ROLE)]
    if not workers:
        return Processors(prepared, _nothing)
    timeouts = config.timeouts
    pool = ProcessorPool(
        workers,
        prepared.media,
        prepared.processor.num_media,
        hosts=RoleHosts(spawner, ROLE, start, stop_s=timeouts.stop_s),
        restarts=restart_policy(config),
        start_s=timeouts.start_s,
        alive_s=alive_s(config),
        timeout_s=timeouts.prepare_s,
        object_s=timeouts.object_s,
        on_lost=on_lost,
    )
    watched = watched_pool(ROLE, pool.pool.check, pool.pool.close)
    return Processors(replace(prepared, preparation=pool), pool.start, (watched,), {ROLE: pool.pool})


async def _nothing() -> None:
    """No worker has to be waited for."""
