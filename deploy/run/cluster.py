"""The cluster of a run: every check before it, the Ray session, the plan, and its reservations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mobula.deploy.host.session import ClusterSession, check_access, expected_nodes, ray_session  # isort: skip  (first: sets what ray reads)
import ray

from mobula.cluster.metrics.hub import StartUp
from mobula.cluster.recovery.checkpoints import refuse_other_run
from mobula.cluster.runtime.placement import PlacementPlan, plan_placement
from mobula.cluster.runtime.placement_groups import create_placement_groups, plan_when_free
from mobula.configs.schema import RunConfig
from mobula.deploy.host.machine import examine_apart, refuse_flaws
from mobula.deploy.planning.clusters import joined_nodes, this_node
from mobula.deploy.planning.plan_command import planned_engine, refuse_too_small_cache
from mobula.deploy.preflight.findings import check_engine_build
from mobula.deploy.preloading.preloaded import Preloaded
from mobula.deploy.run.node_network import check_network, check_on_all_nodes
from mobula.deploy.wiring.preparation import AnyPrepared, prepare
from mobula.deploy.wiring.spawner import Spawner


@dataclass(frozen=True)
class RunCluster:
    """A connected cluster with the plan and the parts of the run on it."""

    prepared: AnyPrepared
    session: ClusterSession
    plan: PlacementPlan
    logs: Path | None  # the folder of the workers' logs; None where there is no run folder
    preloaded: Preloaded | None

    @asynccontextmanager
    async def spawner(self) -> AsyncIterator[Spawner]:
        config = self.prepared.config
        bookings = await asyncio.to_thread(
            create_placement_groups, self.plan, run_name=config.name, timeout_s=config.timeouts.start_s
        )
        spawner = Spawner(config, self.session, self.plan, bookings, self.logs, self.preloaded)
        try:
            yield spawner
        finally:
            await asyncio.to_thread(spawner.close)


@contextmanager
def joined_cluster(
    config: RunConfig,
    roles: tuple[str, ...],
    logs: Path | None,
    start_up: StartUp,
    preloaded: Preloaded | None,
    checkpoint: Path | None = None,
) -> Iterator[RunCluster]:
    """Runs every check that needs no cluster and checks access to it, then joins or starts Ray."""
    check_access(config)
    if "rollout" in roles:
        refuse_too_small_cache(config)
    nodes, engine = expected_nodes(config), None
    if nodes is not None:
        plan_placement(config.resources, nodes, roles)
        if config.resources.device == "cuda":
            refuse_flaws({"this machine": examine_apart()})
        check_engine_build(config, roles)
        engine = planned_engine(config, (this_node(config.resources),), roles)
    prepared = prepare(config, ray.put)
    if checkpoint is not None:
        refuse_other_run(checkpoint, prepared.identity)
    start_up.ended("checks")
    with ray_session(config) as session:
        plan = plan_when_free(config.resources, roles, wait_s=config.timeouts.stop_s)
        if nodes is None:
            check_on_all_nodes(config)
            check_network(plan)
            joined = joined_nodes()
            used = {worker.node_id: worker.node_name for worker in plan.workers if worker.num_gpus}
            refuse_flaws({used[n.node_id]: n.cuda for n in joined if n.cuda and n.node_id in used})
            engine = planned_engine(config, joined, roles)
        start_up.ended("Ray")
        yield RunCluster(replace(prepared, engine=engine), session, plan, logs, preloaded)


def write_plan(path: Path, plan: PlacementPlan) -> None:
    rows = [
        {
            "role": worker.role,
            "index": worker.index,
            "cpus": worker.num_cpus,
            "gpus": worker.num_gpus,
            "node": worker.node_name,
            "node_id": worker.node_id,
            "cores": list(worker.cores),
        }
        for worker in plan.workers
    ]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
