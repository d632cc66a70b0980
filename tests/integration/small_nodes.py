"""A small run on a cluster of three nodes, to two of which a signal comes (SIGKILL: dead, SIGSTOP: silent, SIGCONT:
slow), each at a moment:

    python tests/integration/small_nodes.py FOLDER SIGNAL MOMENT MOMENT

Answers are so large that each lives on the node that sampled it. It leaves `result.json` in its folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]
SIGNS = "40" if "SIGCONT" in sys.argv else "3"  # that a node may fail to give before it is taken for dead
os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": SIGNS}

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402
from sabotage import Saboteur  # noqa: E402
from small_cluster import Shape, SmallRun  # noqa: E402
from small_roles import SmallLearner  # noqa: E402
from small_workers import SmallReward  # noqa: E402
from waiting import until  # noqa: E402

from mobula.cluster.runtime.placement import PlacedWorker, PlacementPlan, plan_placement  # noqa: E402
from mobula.cluster.runtime.placement_groups import cluster_nodes, create_placement_groups  # noqa: E402
from mobula.cluster.runtime.ray_actors import answer  # noqa: E402
from mobula.configs.load import load_config  # noqa: E402
from mobula.deploy.host.run_folder import marking  # noqa: E402
from mobula.deploy.host.session import ClusterSession  # noqa: E402
from mobula.deploy.wiring.spawner import RoleHosts, Spawner  # noqa: E402

VICTIMS = {3: "node/1", 7: "node/2"}  # version from which on it comes to it -> whose raylet is struck
THERE = {"rollout/0": 1, "reward/0": 1, "rollout/1": 2, "reference/0": 2}  # worker -> node; others on the head
PLANNED = {"reward": 1, "learner": 2}  # role -> node of those that the run's own spawner places
ALL = (*THERE, "reward/1", "learner/0", "learner/1")
NUM_STEPS = 11
ANSWER_BYTES = 200_000  # Ray keeps smaller objects with their owner, the driver
STORE_BYTES = 80 * 2**20
PATH = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def main(folder: Path, kind: signal.Signals, moments: Sequence[str], ray_folder: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args=_node(ray_folder) | {"include_dashboard": False})
    nodes = [cluster.head_node, cluster.add_node(**_node(None)), cluster.add_node(**_node(None))]
    ray.init(address=cluster.address, namespace="nodes", log_to_driver=False)
    saboteur = Saboteur(folder)
    for index, node in enumerate(nodes):
        (folder / f"pid-node-{index}").write_text(str(node.all_processes["raylet"][0].process.pid))
    try:
        faults = dict(zip(VICTIMS, moments, strict=True))
        found = asyncio.run(_lose_nodes(folder, saboteur, kind, faults, [node.node_id for node in nodes]))
        (folder / "result.json").write_text(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


async def _lose_nodes(
    folder: Path, saboteur: Saboteur, kind: signal.Signals, faults: Mapping[int, str], nodes: list[str]
) -> dict[str, Any]:
    homes: dict[str, int] = {}

    async def plan(version: int) -> None:
        if not homes:
            raylets = [saboteur.process_id(f"node/{index}") for index in range(len(nodes))]
            homes.update({name: raylets.index(_parent_of(saboteur.process_id(name))) for name in ALL})
        if version in faults:
            await until(lambda: run.is_whole, 240)
            saboteur.plan(faults[version], victim=VICTIMS[version], signal=kind)

    shape = Shape(
        total_steps=NUM_STEPS, answer_bytes=ANSWER_BYTES, options_of=lambda name: _on(nodes[THERE.get(name, 0)])
    )
    async with _Moving(folder, nodes) as moving:
        run = _NodesRun(folder, shape, on_version=plan)
        run.spawner = moving.spawner
        await run.go()
        return {
            "struck": saboteur.struck,
            "trained": run.trained,
            "losses": run.losses,
            "homes": homes,
            "moved": [moving.node, await moving.again()],
            "ranks": [rank.node_id for rank in moving.spawner.book_together("learner")],
            "groups": sum(group["state"] == "CREATED" for group in ray.util.placement_group_table().values()),
            "nodes": nodes,
        }


class _NodesRun(SmallRun):
    """Its learner ranks are placed by the run's own spawner."""

    spawner: Spawner

    def _spawn_ranks(self) -> list[Any]:
        ranks = self.spawner.book_together("learner")
        return [
            self.spawner.start(SmallLearner, rank.name, self.folder, rank.index, len(ranks), worker=rank, env=PATH)
            for rank in ranks
        ]


class _Moving:
    """A worker that the run's own spawner placed on a node; once that is gone it gets another place."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.node = nodes[PLANNED["reward"]]
        self._nodes = nodes
        self._folder = folder
        self._config = load_config(["experiment=digits", f"folder={folder}", "name=moving"])

    async def __aenter__(self) -> _Moving:
        self._mark = marking("moving")
        mark = self._mark.__enter__()
        plan = PlacementPlan(tuple(worker for role in PLANNED for worker in self._planned(role)))
        bookings = await asyncio.to_thread(create_placement_groups, plan, run_name="moving", timeout_s=60)
        self.spawner = Spawner(self._config, ClusterSession(cluster_nodes(), True, mark), plan, bookings)
        self._hosts = RoleHosts(self.spawner, "reward", self._start, stop_s=1)
        self._handle = await self._hosts.start(0)
        await self._ping()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.spawner.close)
        self._mark.__exit__(None, None, None)

    async def again(self) -> str:
        """Replace the worker as its pool would; the node where it is now."""
        await self._hosts.stop(0, self._handle)
        self._handle = await self._hosts.start(0)
        await self._ping()
        return (await asyncio.to_thread(self.spawner.book, "reward", 0)).node_id

    def _planned(self, role: str) -> tuple[PlacedWorker, ...]:
        there = tuple(node for node in cluster_nodes() if node.node_id == self._nodes[PLANNED[role]])
        return plan_placement(self._config.resources, there, (role,)).workers

    def _start(self, worker: Any) -> Any:
        return self.spawner.start(SmallReward, "moving", self._folder, worker=worker, env=PATH)

    async def _ping(self) -> None:
        await answer(self._handle.ping.remote(), timeout_s=90, what="the moving worker to start")


def _parent_of(process_id: int) -> int:
    """A worker's parent is the raylet of its node."""
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


def _on(node_id: str) -> dict[str, Any]:
    """There as long as it is alive, then anywhere."""
    if not any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):
        return {}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def _node(folder: str | None) -> dict[str, Any]:
    own = {"temp_dir": folder} if folder else {}
    return {"num_cpus": 2, "object_store_memory": STORE_BYTES, **own}


if __name__ == "__main__":
    short = tempfile.mkdtemp(prefix="mobula-", dir="/tmp")  # a Unix socket's path may have 107 characters at most
    os.environ["RAY_TMPDIR"] = short
    (Path(short) / "ray").mkdir()  # where `Cluster` leaves its address
    try:
        main(Path(sys.argv[1]), signal.Signals[sys.argv[2]], sys.argv[3:], short)
    finally:
        shutil.rmtree(short, ignore_errors=True)
