"""Sizes of engines, and whether a plan fits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import PlacementPlan, needed_roles, plan_placement
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.deploy.planning.clusters import PlannedNode
from mobula.deploy.planning.memory import FLOAT32, HEAD_COPIES, sequence_bytes
from mobula.deploy.planning.workers import CONTEXT, KV_CACHE, USABLE, WorkerMemory, worker_memory
from mobula.deploy.preflight.decisions import decided
from mobula.learner.policies.shapes import ModelShape

MIB = 2**20


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of a vLLM engine on each of its GPUs."""

    kv_cache_bytes: int  # 0: the rest of `memory_bytes`, once vLLM has measured what a step takes
    num_seqs: int
    memory_bytes: int  # that the engine takes beyond the context of its process


def engine_sizes(
    config: RunConfig, sized: RunConfig, engine: WorkerMemory, placement: PlacementPlan
) -> EngineSizes | None:
    """Sizes of engines whose memory is planned from `sized`, which `with_engine_sizes` made of `config`; None on CPU
    and for other samplers than vLLM, which take those of the configuration.

    vLLM can measure its step only where no other process changes the memory of the GPU meanwhile. Engines that share
    their GPUs get the planned KV cache.
    """
    if sized.resources.device == "cpu" or sized.sampler.kind is not SamplerKind.VLLM:
        return None
    memory = max(sum(parts.values()) - parts[CONTEXT] for parts in engine.device.values())
    measures = config.sampler.vllm.kv_cache_bytes == 0 and not _shares_a_gpu(placement)
    return EngineSizes(0 if measures else sized.sampler.vllm.kv_cache_bytes, sized.sampler.vllm.max_num_seqs, memory)


def _shares_a_gpu(placement: PlacementPlan) -> bool:
    workers = Counter((worker.node_id, gpu) for worker in placement.workers for gpu in worker.gpus)
    return any(workers[engine.node_id, gpu] > 1 for engine in placement.of_role("rollout") for gpu in engine.gpus)


def with_engine_sizes(
    config: RunConfig, shape: ModelShape, placement: PlacementPlan, nodes: Sequence[PlannedNode]
) -> RunConfig:
    """The configuration with numbers for `kv_cache_bytes` and `max_num_seqs` of `sampler.vllm` where they are 0.

    The KV cache takes what every engine's GPUs have left in all phases in which it is there, less the logits of its
    sequences. It holds at least the siblings of one prompt at the longest length, even where they do not fit: the plan
    then names the shortfall.
    """
    sampler, vllm = config.sampler, config.sampler.vllm
    is_sized = vllm.kv_cache_bytes > 0 and vllm.max_num_seqs > 0
    if is_sized or sampler.kind is not SamplerKind.VLLM or not placement.of_role("rollout"):
        return config
    sequence = sequence_bytes(config, shape, sampler.max_model_len)
    logits = shape.vocab * HEAD_COPIES * FLOAT32
    if vllm.kv_cache_bytes:
        return _with(config, vllm.kv_cache_bytes, _bounded(config, vllm.kv_cache_bytes // sequence))
    room = _room(_with(config, 0, 0), shape, placement, nodes)
    num_seqs = vllm.max_num_seqs or _bounded(config, room // (sequence + logits))
    least = config.algorithm.samples_per_prompt * sequence
    return _with(config, max(least, (room - num_seqs * logits) // MIB * MIB), num_seqs)


def _bounded(config: RunConfig, num_seqs: int) -> int:
    """At least the siblings of a prompt, at most the responses of one engine's share of the groups under way, and no
    more than one step processes tokens."""
    algorithm, siblings = config.algorithm, config.algorithm.samples_per_prompt
    groups = ceil(algorithm.max_concurrent_groups / config.resources.rollout.num_workers)
    most = min(groups * siblings, config.sampler.vllm.max_num_batched_tokens)
    return max(1, min(most, max(siblings, num_seqs)))


def _room(bare: RunConfig, shape: ModelShape, placement: PlacementPlan, nodes: Sequence[PlannedNode]) -> int:
    """Returns the bytes left for a KV cache on each engine GPU; `bare` is planned without a KV cache."""
    roles = dict.fromkeys(worker.role for worker in placement.workers)
    memory = {role: worker_memory(bare, shape, role) for role in roles}
    gpu_bytes = {node.node_id: node.gpu_bytes for node in nodes}
    rooms = []
    for node_id, gpu in {(w.node_id, gpu) for w in placement.of_role("rollout") for gpu in w.gpus}:
        size = gpu_bytes[node_id]
        if size is None:
            raise PreflightError(
                f"sampler.vllm.kv_cache_bytes={bare.sampler.vllm.kv_cache_bytes} follows from the memory of the GPUs "
                f"of node {node_id}, which is not known: set it and sampler.vllm.max_num_seqs"
            )
        here = [memory[w.role] for w in placement.workers if w.node_id == node_id and gpu in w.gpus]
        usable = int(USABLE * size)
        if bare.sampler.vllm.gpu_memory_fraction:
            own = memory["rollout"]
            rooms.append(int(bare.sampler.vllm.gpu_memory_fraction * size) - own.peak + own.context)
        with_cache = {phase for phase, parts in memory["rollout"].device.items() if KV_CACHE in parts}
        absent = {phase for worker in here for phase in worker.device} - memory["rollout"].device.keys()
        rooms.append(usable - _peak(here, size, with_cache | absent))
    return min(rooms)


def _with(config: RunConfig, kv_cache_bytes: int, num_seqs: int) -> RunConfig:
    sizes: Mapping[str, int] = {"kv_cache_bytes": kv_cache_bytes, "max_num_seqs": num_seqs}
    vllm = config.sampler.vllm.model_copy(update=sizes)
    return config.model_copy(update={"sampler": config.sampler.model_copy(update={"vllm": vllm})})


GIB = 2**30
DRIVER_PROCESS = 1050 * 2**20  # host memory of the driver with its libraries


@dataclass(frozen=True)
class Demand:
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
    """Places `roles` (None: all roles of the run) on `nodes` and sums the demand on each memory."""
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


def _peak(workers: Sequence[WorkerMemory], gpu_bytes: int | None, phases: Iterable[str] = ()) -> int:
    """Returns the most bytes that the workers hold together in one of the phases (none: any), which they enter
    together. In a phase that a worker lacks, as other roles lack the learner's loading, it counts with its peak."""
    phases = phases or {phase for worker in workers for phase in worker.device}
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
