"""Whether a run's memory fits: the workers of a placement plan on their GPUs and nodes, phase by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.runtime.placement import PlacementPlan, needed_roles, plan_placement
from configs.schema import RunConfig
from deploy.planning.clusters import PlannedNode
from deploy.planning.workers import WorkerMemory, worker_memory
from learner.policies.shapes import ModelShape

USABLE = 0.95  # of a memory: the rest is fragmentation, the driver, other processes
GIB = 2**30
DRIVER_PROCESS = 1050 * 2**20  # host memory of the driver with its libraries


@dataclass(frozen=True)
class Demand:
    """Memory that one device or one host needs."""

    node_id: str
    place: str  # "GPU 0", or "host memory"
    num_bytes: int
    available: int | None  # None where it is not known
    workers: tuple[str, ...]

    @property
    def shortfall(self) -> int:
        """Bytes that are missing; 0 where it fits, or where the memory is not known."""
        return 0 if self.available is None else max(0, self.num_bytes - int(USABLE * self.available))


@dataclass(frozen=True)
class MemoryPlan:
    """A placed run with its memory."""

    placement: PlacementPlan
    by_role: Mapping[str, WorkerMemory]
    demands: tuple[Demand, ...]

    @property
    def shortfalls(self) -> tuple[Demand, ...]:
        return tuple(demand for demand in self.demands if demand.shortfall)


def plan_memory(config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode]) -> MemoryPlan:
    """Place the run on `nodes` and add up what each memory has to hold.

    Raises:
        PlacementError: CPUs or GPUs do not suffice.
    """
    roles = needed_roles(config)
    placement = plan_placement(config.resources, [node.resources for node in nodes], roles)
    by_role = {role: worker_memory(config, shape, role) for role in roles}
    demands = [*_on_gpus(placement, by_role, nodes), *_in_hosts(config, placement, by_role, nodes)]
    return MemoryPlan(placement, by_role, tuple(demands))


def _on_gpus(
    placement: PlacementPlan, by_role: Mapping[str, WorkerMemory], nodes: Sequence[PlannedNode]
) -> list[Demand]:
    found = []
    for node in nodes:
        for gpu in range(int(node.resources.num_gpus)):
            here = [w for w in placement.workers if w.node_id == node.node_id and gpu in w.gpus]
            if here:
                peak = _peak([by_role[worker.role] for worker in here])
                names = tuple(worker.name for worker in here)
                found.append(Demand(node.node_id, f"GPU {gpu}", peak, node.gpu_bytes, names))
    return found


def _peak(workers: Sequence[WorkerMemory]) -> int:
    """The most bytes that these workers hold at the same time.

    Workers go through phases together. In a phase that a worker lacks it counts with its own peak."""
    phases = dict.fromkeys(phase for worker in workers for phase in worker.device)
    return max(sum(_in_phase(worker, phase) for worker in workers) for phase in phases)


def _in_phase(worker: WorkerMemory, phase: str) -> int:
    return sum(worker.device[phase].values()) if phase in worker.device else worker.peak


def _in_hosts(
    config: RunConfig, placement: PlacementPlan, by_role: Mapping[str, WorkerMemory], nodes: Sequence[PlannedNode]
) -> list[Demand]:
    """Host memory: what workers keep there, and on the first node of a cluster the driver and the object store."""
    is_cpu = config.resources.device == "cpu"
    total: dict[str, int] = defaultdict(int)
    names: dict[str, list[str]] = defaultdict(list)
    for worker in placement.workers:
        memory = by_role[worker.role]
        total[worker.node_id] += sum(memory.host.values()) + (memory.peak if is_cpu else 0)
        names[worker.node_id].append(worker.name)
    total[nodes[0].node_id] += driver_bytes(config)
    for node in nodes:
        total[node.node_id] += config.resources.object_store_bytes if node.node_id in names else 0
    return [
        Demand(node.node_id, "host memory", total[node.node_id], node.host_bytes, tuple(names[node.node_id]))
        for node in nodes
        if total[node.node_id]
    ]


def driver_bytes(config: RunConfig) -> int:
    """The driver: its libraries, the pictures that it keeps processed, and the replay buffer."""
    return DRIVER_PROCESS + config.data.media_cache_bytes + config.replay.max_bytes
