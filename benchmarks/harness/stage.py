"""The environment of benchmarks: a private Ray cluster, and the roles of a run on it, spawned as a run spawns them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mobula.deploy.host.session import ray_session, start_private  # isort: skip  (sets what ray reads when imported)
import ray

from mobula.actors.datasets.prompts import PromptSource
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.cluster.runtime.placement_groups import create_placement_groups, plan_when_free, remove_placement_groups
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import TRAIN, Prepared, prepare
from mobula.deploy.wiring.roles import Inference, spawn_inference
from mobula.deploy.wiring.spawner import Spawner


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Directly below /tmp: a Unix socket's path, which Ray makes from it, may have 107 characters at most."""
    folder = Path(tempfile.mkdtemp(prefix="mobula-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def scratch_config(
    settings: Sequence[str], overrides: Sequence[str], *, experiment: str = "digits"
) -> Iterator[RunConfig]:
    """A run of `experiment` with a benchmark's `settings`, then the user's `overrides`. Its folder is removed."""
    with scratch_folder() as folder:
        own = overridden([f"experiment={experiment}", f"folder={folder}", "metrics.progress=false"], settings)
        yield load_config(overridden(own, overrides))


@contextmanager
def private_ray(config: RunConfig) -> Iterator[None]:
    """A cluster on the loopback address with a folder of its own; whatever runs in the body joins it."""
    with scratch_folder() as folder:
        start_private(config, include_dashboard=False, temp_dir=folder)
        try:
            yield
        finally:
            ray.shutdown()


@dataclass(frozen=True)
class Stage:
    """A prepared run and what spawns its roles."""

    prepared: Prepared
    spawner: Spawner

    def prompts(self, num_rounds: int, num_prompts: int) -> list[list[Prompt]]:
        """Fresh prompts for every round: an engine never sees one twice, as in training."""
        prepared = self.prepared
        source = PromptSource(
            prepared.splits[TRAIN].rows, prepared.preparation, seed=prepared.config.seed, split_name=TRAIN
        )
        return [[source.next() for _ in range(num_prompts)] for _ in range(num_rounds)]


@asynccontextmanager
async def engines(config: RunConfig) -> AsyncIterator[tuple[Stage, Inference]]:
    """The run's engines, loaded, on the cluster that `private_ray` started. What they sample is not scored."""
    async with staged(config, ("rollout", "reward")) as stage:
        inference = spawn_inference(stage.prepared, stage.spawner, on_lost=lambda kind: None)
        inference.in_flight_requests.on_ended = lambda ended: None
        await inference.rollouts.start()
        yield stage, inference
        await inference.rollouts.close()
        for role in inference.watched:
            await role.close()


@asynccontextmanager
async def staged(config: RunConfig, roles: tuple[str, ...]) -> AsyncIterator[Stage]:
    """Book `roles` on the cluster that `private_ray` started."""
    with ray_session(config) as session:
        plan = plan_when_free(config.resources, roles, wait_s=config.timeouts.stop_s)
        bookings = create_placement_groups(plan, run_name=config.name, timeout_s=config.timeouts.start_s)
        try:
            stage = Stage(prepare(config, ray.put), Spawner(config, session, plan, bookings))
            tune_gc()  # as a run does
            yield stage
        finally:
            remove_placement_groups(bookings)
