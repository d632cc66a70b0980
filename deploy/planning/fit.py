"""Whether a run's memory fits: the workers of a placement plan on their GPUs and nodes, phase by phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mobula.cluster.runtime.placement import PlacementPlan, needed_roles, plan_placement
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode
from mobula.deploy.planning.engine_sizes import EngineSizes, engine_sizes, with_engine_sizes
from mobula.deploy.planning.workers import USABLE, WorkerMemory, worker_memory
from mobula.deploy.preflight.decisions import decided
from mobula.learner.policies.shapes import ModelShape

GIB = 2**30
DRIVER_PROCESS = 1050 * 2**20  # host memory of the driver with its libraries


@dataclass(frozen=True)
class Demand:
    """Memory demand of one device or host."""

    node_id: str
    place: str  # "GPU 0", or "host memory"
    num_bytes: int
    available: int | None  # None where it is not known
    workers: tuple[str, ...]

    @property
    def shortfall(self) -> int:
        """Missing bytes; 0 if the demand fits or the memory is unknown."""
        return 0 if self.available is None else max(0, self.num_bytes - int(USABLE * self.available))


@dataclass(frozen=True)
class MemoryPlan:
    """Placement and memory of a run."""

    placement: PlacementPlan
    by_role: Mapping[str, WorkerMemory]
    demands: tuple[Demand, ...]
    engine: EngineSizes | None  # None for a run without vLLM on GPUs

    @property
    def shortfalls(self) -> tuple[Demand, ...]:
        return tuple(demand for demand in self.demands if demand.shortfall)


def plan_memory(
    config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode], roles: Sequence[str] | None = None
) -> MemoryPlan:
    """Places `roles` (None: all roles of the run) on `nodes` and sums the demand on each memory.

    Raises:
        PlacementError: CPUs or GPUs do not suffice.
        PreflightError: an engine's KV cache follows from a GPU whose memory is not known.
    """
    roles = needed_roles(config) if roles is None else roles
    config, _ = decided(config, {shape.model_type: shape.family})
    placement = plan_placement(config.resources, [node.resources for node in nodes], roles)
    sized = with_engine_sizes(config, shape, placement, nodes)
    by_role = {role: worker_memory(sized, shape, role) for role in roles}
    demands = [*_on_gpus(placement, by_role, nodes), *_in_hosts(sized, placement, by_role, nodes)]
    engine = engine_sizes(config, sized, by_role["rollout"], placement) if "rollout" in by_role else None
    return MemoryPlan(placement, by_role, tuple(demands), engine)


def _on_gpus(
    placement: PlacementPlan, by_role: Mapping[str, WorkerMemory], nodes: Sequence[PlannedNode]
) -> list[Demand]:
    demands = []
    for node in nodes:
        for gpu in range(int(node.resources.num_gpus)):
            here = [w for w in placement.workers if w.node_id == node.node_id and gpu in w.gpus]
            if here:
                peak = _peak([by_role[worker.role] for worker in here], node.gpu_bytes)
                names = tuple(worker.name for worker in here)
                demands.append(Demand(node.node_id, f"GPU {gpu}", peak, node.gpu_bytes, names))
    return demands


def _peak(workers: Sequence[WorkerMemory], gpu_bytes: int | None) -> int:
    """Returns the peak of the workers' total bytes over the phases, which they enter together."""
    phases = dict.fromkeys(phase for worker in workers for phase in worker.device)
    return max(sum(worker.in_phase(phase, gpu_bytes) for worker in workers) for phase in phases)


def _in_hosts(
    config: RunConfig, placement: PlacementPlan, by_role: Mapping[str, WorkerMemory], nodes: Sequence[PlannedNode]
) -> list[Demand]:
    """Returns the host-memory demand: workers on each node, plus driver and object store on the first node."""
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
    """The driver: its libraries, the images that it keeps processed, and the replay buffer."""
    return DRIVER_PROCESS + config.data.media_cache_bytes + config.replay.max_bytes
