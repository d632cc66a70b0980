"""`mobula plan`: sizes of engines, whether a run fits its nodes, and settings with which it would."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import PlacementPlan, PlanRow, needed_roles, plan_placement, plan_table
from mobula.configs.load import resolved
from mobula.configs.overrides import MISSING, groups, merge, own_values
from mobula.configs.rules import checked
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.deploy.host.authentication import connected
from mobula.deploy.planning.activations import FLOAT32, HEAD_COPIES, refuse_small_cache, sequence_bytes
from mobula.deploy.planning.clusters import PlannedNode, described_nodes, joined_nodes, read_cluster, this_node
from mobula.deploy.planning.memory import CONTEXT, KV_CACHE, USABLE, WorkerMemory, encoders, policy_shape, worker_memory
from mobula.deploy.preflight.decisions import decided
from mobula.learner.policies.shapes import AnyShape, ImageShape, ModelShape

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
    config: RunConfig, shape: AnyShape, placement: PlacementPlan, nodes: Sequence[PlannedNode]
) -> RunConfig:
    """The configuration with numbers for `kv_cache_bytes` and `max_num_seqs` of `sampler.vllm` where they are 0.

    The KV cache takes what every engine's GPUs have left in all phases in which it is there, less the logits of its
    sequences. It holds at least the siblings of one prompt at the longest length, even where they do not fit: the plan
    then names the shortfall.
    """
    sampler, vllm = config.sampler, config.sampler.vllm
    if isinstance(shape, ImageShape) or min(vllm.kv_cache_bytes, vllm.max_num_seqs) > 0:
        return config
    if sampler.kind is not SamplerKind.VLLM or not placement.of_role("rollout"):
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
    config: RunConfig, shape: AnyShape, nodes: Sequence[PlannedNode], roles: Sequence[str] | None = None
) -> MemoryPlan:
    """Places `roles` (None: all roles of the run) on `nodes` and sums the demand on each memory."""
    roles = needed_roles(config) if roles is None else roles
    if isinstance(shape, ModelShape):
        config, _ = decided(config, {shape.model_type: shape.family})
    placement = plan_placement(config.resources, [node.resources for node in nodes], roles)
    sized = with_engine_sizes(config, shape, placement, nodes)
    by_role = {role: worker_memory(sized, shape, role) for role in roles}
    driver = {"process": DRIVER_PROCESS, **encoders(shape)}
    demands = [*_on_gpus(placement, by_role, nodes), *_in_hosts(sized, placement, by_role, nodes, driver)]
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
    config: RunConfig,
    placement: PlacementPlan,
    by_role: Mapping[str, WorkerMemory],
    nodes: Sequence[PlannedNode],
    driver: Mapping[str, int],
) -> list[Demand]:
    is_cpu = config.resources.device == "cpu"
    total: dict[str, int] = defaultdict(int)
    names: dict[str, list[str]] = defaultdict(list)
    for worker in placement.workers:
        memory = by_role[worker.role]
        total[worker.node_id] += sum(memory.host.values()) + (memory.peak if is_cpu else 0)
        names[worker.node_id].append(worker.name)
    # The images that the driver keeps processed, and the replay buffer.
    total[nodes[0].node_id] += sum(driver.values()) + config.data.media_cache_bytes + config.replay.max_bytes
    for node in nodes:
        total[node.node_id] += config.resources.object_store_bytes if node.node_id in names else 0
    return [
        Demand(node.node_id, "host memory", total[node.node_id], node.host_bytes, tuple(names[node.node_id]))
        for node in nodes
        if total[node.node_id]
    ]


NUM_SHOWN = 3
MOST_TOGETHER = 4  # settings in one proposal
LEAST_SEQUENCES = 4  # of the longest length, in a KV cache that is proposed
ADAPTER_RANK = 16
Setting = Mapping[str, Any]  # key -> value, or group -> option


def remedies(
    config: RunConfig, shape: AnyShape, nodes: Sequence[PlannedNode], roles: Sequence[str] | None = None
) -> list[str]:
    """Returns up to three proposals, each a list of overrides; the shortest first. `roles` are as in `plan_memory`."""
    proposals: list[Setting] = []
    settings = list(_settings(config, shape, nodes))
    for number in range(1, MOST_TOGETHER + 1):
        for chosen in combinations(settings, number):
            merged = {key: value for setting in chosen for key, value in setting.items()}
            if len(merged) < sum(map(len, chosen)) or any(
                set(proposal.items()) <= set(merged.items()) for proposal in proposals
            ):
                continue  # two values for one key, or no less than what suffices already
            if fits_with(config, shape, nodes, merged, roles):
                proposals.append(merged)
            if len(proposals) == NUM_SHOWN:
                return [words(setting) for setting in proposals]
        if proposals and number > 1:  # there are thousands of triples, and each is planned
            break
    return [words(setting) for setting in proposals]


def words(setting: Setting) -> str:
    """Formats a setting as command-line overrides; an override of a group replaces an earlier one."""
    return " ".join(f"{key}={_word(value)}" for key, value in setting.items())


def changed(config: RunConfig, setting: Setting) -> RunConfig:
    """Returns the configuration with changed values; groups are applied first."""
    values = config.model_dump(mode="json")
    for group in groups().keys() & setting.keys():
        merge(values, own_values(group, setting[group]))
    for key, value in setting.items():
        if key in groups():
            continue
        *parents, last = key.split(".")
        section = values
        for part in parents:
            section = section[part]
        section[last] = value
    # Presets count their workers by nodes: `${times:${resources.num_nodes},4}`.
    values |= resolved({"resources": values["resources"]})
    return checked(RunConfig.model_validate_json(json.dumps(values), strict=True))


def fits_with(
    config: RunConfig,
    shape: AnyShape,
    nodes: Sequence[PlannedNode],
    setting: Setting,
    roles: Sequence[str] | None = None,
) -> bool:
    """Whether the run fits into the memory of the nodes with a setting."""
    try:
        return not plan_memory(changed(config, setting), shape, nodes, roles).shortfalls
    except (ValueError, PreflightError):  # the sections contradict, or the model lacks what the setting names
        return False


def _settings(config: RunConfig, shape: AnyShape, nodes: Sequence[PlannedNode]) -> Iterator[Setting]:
    learner, resources = config.learner, config.resources
    if learner.activation_checkpointing == "none":
        yield CHECKPOINTING
    yield from _of_roles(config, nodes)
    longest = config.data.max_prompt_tokens + config.sampler.max_tokens
    serves_adapters = config.sampler.adapters.are_on  # the training service has no reference, and trains adapters
    is_service = serves_adapters or config.training_service.weights == "full"  # or all weights
    if learner.backend != "single" and not (config.sampler.is_flow or is_service):
        yield {"learner.sequence_parallel": 2 * learner.sequence_parallel}
    tokens = learner.tokens_per_microbatch // 2
    while tokens >= longest:
        yield {"learner.tokens_per_microbatch": tokens}
        tokens //= 4
    if tokens < longest < learner.tokens_per_microbatch:
        yield {"learner.tokens_per_microbatch": longest}
    if config.sampler.kind is SamplerKind.VLLM and isinstance(shape, ModelShape):
        least = LEAST_SEQUENCES * sequence_bytes(config, shape, config.sampler.max_model_len)
        shares = (config.sampler.vllm.kv_cache_bytes // n for n in (2, 4, 8))
        yield from ({"sampler.vllm.kv_cache_bytes": share} for share in shares if share >= least)
    if learner.backend == "deepspeed" and learner.zero_stage == 2:
        yield {"learner.zero_stage": 3}
    if serves_adapters:
        return
    if resources.reference.num_gpus < 1 and config.needs_reference and not is_service:
        yield {"resources.reference.num_gpus": 1.0}
    if config.needs_reference and not (config.algorithm.distillation.is_on or is_service):
        # The learner's ranks shard the frozen weights; a scorer holds a whole model.
        adapters = {} if config.policy.lora.is_on else {"policy.lora.rank": ADAPTER_RANK}
        yield {**adapters, "reference.place": "learner_ranks"}
        yield {"algorithm.kl.coef": 0.0}
    if isinstance(shape, ModelShape) and shape.vision is not None and not config.policy.freeze:
        yield {"policy.freeze": ("visual.",)}
    if not (config.policy.lora.is_on or is_service):
        yield {"policy.lora.rank": ADAPTER_RANK}


def _of_roles(config: RunConfig, nodes: Sequence[PlannedNode]) -> Iterator[Setting]:
    learner, resources = config.learner, config.resources
    for preset in presets(config, len(nodes)):
        yield on_preset(config, preset, len(nodes))
    if resources.device == "cpu" and len(nodes) == 1:  # ranks on one node share its memory: one needs least
        if learner.backend != "single":
            yield {
                "learner": "single",
                **({"resources.learner.num_workers": 1} if resources.learner.num_workers > 1 else {}),
            }
            yield {"learner": "single"}
    elif learner.backend != "single":
        for number in (resources.learner.num_workers + 1, resources.learner.num_workers * 2):
            yield {"resources.learner.num_workers": number}
    if resources.learner.num_gpus < 1 and resources.device == "cuda":
        yield {"resources.learner.num_gpus": 1.0}
    for number in (resources.rollout.num_workers - 1, resources.rollout.num_workers // 2):
        if number > 0:
            yield {"resources.rollout.num_workers": number}


def presets(config: RunConfig, num_nodes: int) -> Iterator[str]:
    """Other presets of the same device that start or use the same cluster of `num_nodes`; those with ranks for a critic
    for a run that has one."""
    for preset in groups()["resources"]:
        values = _own(preset)
        fits = values.get("device", "cpu") == config.resources.device and "address" not in values
        idle = "num_workers" in values.get("critic", {}) and not config.algorithm.critic.is_on
        lacks_nodes = num_nodes < values.get("num_nodes", 1)
        if fits and preset != config.resources.preset and not idle and not lacks_nodes:
            yield preset


def on_preset(config: RunConfig, preset: str, num_nodes: int) -> Setting:
    counted = {"resources.num_nodes": num_nodes} if "num_nodes" in _own(preset) else {}
    return {"resources": preset, **counted}


def _own(preset: str) -> dict[str, Any]:
    return {key: value for key, value in own_values("resources", preset)["resources"].items() if key != "preset"}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


CHECKPOINTING: Setting = {"learner.activation_checkpointing": "blocks"}
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "sync")
QUANTISED_PARTS = ("quantised", "dequantised", "adapters")  # of a base in few bits; the second is of one product
MOST_LINES = 8


def as_table(rows: Sequence[PlanRow], title: str) -> Table:
    table = Table("role", "node", "workers", "CPUs", "GPUs", "threads each", "cores", title=title)
    for row in rows:
        cores = " | ".join(",".join(str(core) for core in worker) for worker in row.cores if worker)
        table.add_row(
            row.role,
            row.node,
            str(row.num_workers),
            f"{row.num_cpus:g}",
            _gpus(row),
            str(row.num_threads),
            cores or "not bound",
        )
    return table


def _gpus(row: PlanRow) -> str:
    """GPUs, or shares of them: `4`, or `4 x 0.8`."""
    each = row.num_gpus / row.num_workers
    return f"{row.num_gpus:g}" if each == int(each) else f"{row.num_workers} x {each:g}"


def memory_table(plan: MemoryPlan, device: str) -> Table:
    """Returns a table of GiB per worker, one column per role, 80 characters wide. Parts do not sum to the peak, because
    they do not coexist."""
    title = f"GiB of one worker, estimated; on {'its GPU' if device == 'cuda' else 'its node'}, and in host memory"
    table = Table("", *plan.by_role, title=title)
    largest = [memory.largest for memory in plan.by_role.values()]
    shown = (*PARTS, *(part for part in QUANTISED_PARTS if any(part in parts for parts in largest)))
    for part in shown:
        table.add_row(part.replace("_", " "), *(_gib(parts.get(part, 0)) for parts in largest))
    rest = [sum(size for name, size in parts.items() if name not in shown) for parts in largest]
    table.add_row("other", *map(_gib, rest), end_section=True)
    table.add_row("most", *(_gib(memory.peak) for memory in plan.by_role.values()))
    table.add_row("host", *(_gib(sum(memory.host.values())) for memory in plan.by_role.values()))
    return table


def demand_table(demands: Sequence[Demand]) -> Table:
    """Returns a table of the demand on each GPU and node in GiB; equal GPUs of a node share a row."""
    table = Table("node", "memory", "workers", "needed", "there", title="GiB by GPU and node")
    together: dict[tuple[str, int, int | None, tuple[str, ...]], list[Demand]] = {}
    for demand in demands:
        roles = tuple(dict.fromkeys(name.partition("/")[0] for name in demand.workers))
        is_gpu = demand.place.startswith("GPU")
        key = (demand.node_id, demand.num_bytes, demand.available, roles if is_gpu else (*roles, "host"))
        together.setdefault(key, []).append(demand)
    for (node, num_bytes, available, roles), same in together.items():
        label = same[0].place if len(same) == 1 else f"{same[0].place} to {same[-1].place.removeprefix('GPU ')}"
        there = "not known" if available is None else _gib(available)
        style = "red" if same[0].shortfall else None
        shown = ", ".join(role for role in roles if role != "host")
        table.add_row(node, label, shown, _gib(num_bytes), there, style=style)
    return table


def refuse_shortfalls(config: RunConfig, shape: AnyShape, nodes: Sequence[PlannedNode], plan: MemoryPlan) -> None:
    """Name what is missing on each node and up to three settings with which it would fit."""
    short = plan.shortfalls
    if not short:
        return
    lines = [
        f"{d.node_id}, {d.place}: {_gib(d.num_bytes)} GiB needed, {_gib(USABLE * (d.available or 0))} GiB usable, "
        f"{_gib(d.shortfall)} GiB short ({', '.join(d.workers[:4])}{', ...' if len(d.workers) > 4 else ''})"
        for d in short[:MOST_LINES]
    ]
    if len(short) > MOST_LINES:
        lines.append(f"and {len(short) - MOST_LINES} more")
    proposals = remedies(config, shape, nodes, tuple(plan.by_role))
    entries = [f"  {proposal}" for proposal in proposals] or [
        "  none of the settings that save memory is enough: use GPUs with more memory, more nodes or a smaller model"
    ]
    raise PreflightError(
        "\n".join(
            [
                f"resources={config.resources.preset} does not fit into memory with policy.model="
                f"{config.policy.model}:",
                *(f"  {line}" for line in lines),
                "it would fit with" if proposals else "what would help:",
                *entries,
            ]
        )
    )


def _gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:.3g}" if 0.01 <= size < 1000 else f"{size:.0f}"


def make_plan(config: RunConfig, *, short: str | None = None, file: Path | None = None) -> MemoryPlan:
    """The placement and the memory of a run on described nodes, or on this machine."""
    _, nodes = _nodes(config, None, short, file)
    shape = policy_shape(config)
    if shape is None:
        raise PreflightError("memory is planned for a model: set policy.model")
    refuse_small_cache(config, shape)
    plan = plan_memory(config, shape, nodes)
    refuse_shortfalls(config, shape, nodes, plan)
    return plan


def show_plan(
    config: RunConfig, console: Console, *, address: str | None, short: str | None, file: Path | None
) -> tuple[AnyShape, Sequence[PlannedNode]] | None:
    """Prints the plan for the cluster at `address`, a described one, or this machine. Returns the model's shape and the
    nodes, or None while no model is named."""
    location, nodes = _nodes(config, address, short, file)
    placement = plan_placement(config.resources, [node.resources for node in nodes], needed_roles(config))
    console.print(as_table(plan_table(placement), title=f"resources={config.resources.preset}"))
    shape = policy_shape(config, by_name=True)
    if shape is None:
        reason = "of models that sample image tokens is not planned"
        if config.policy.model == MISSING:
            reason = "is planned once policy.model is named"
        console.print(f"{len(placement.workers)} workers fit {location}. Memory {reason}.")
        return None
    refuse_small_cache(config, shape)
    plan = plan_memory(config, shape, nodes)
    console.print(memory_table(plan, config.resources.device))
    console.print(demand_table(plan.demands))
    refuse_shortfalls(config, shape, nodes, plan)
    unknown = "" if all(d.available is not None for d in plan.demands) else " as far as memories are known"
    console.print(
        f"{len(placement.workers)} workers fit {location}{unknown}. Figures are estimates; no GPU has run yet."
    )
    return shape, nodes


def planned_engine(config: RunConfig, nodes: Sequence[PlannedNode], roles: Sequence[str]) -> EngineSizes | None:
    """Before a run loads anything: whether the memory of its roles fits, and the sizes of its engines; None without
    vLLM on GPUs, or where the model is not planned."""
    shape = _known_shape(config)
    if shape is None:
        return None
    plan = plan_memory(config, shape, nodes, roles)
    if "learner" in roles:
        refuse_shortfalls(config, shape, nodes, plan)
    return plan.engine


def refuse_too_small_cache(config: RunConfig) -> None:
    """Before a run loads anything: whether the KV cache of an engine holds one sequence."""
    shape = _known_shape(config) if config.sampler.kind is SamplerKind.VLLM else None
    if shape is not None:
        refuse_small_cache(config, shape)


def _known_shape(config: RunConfig) -> AnyShape | None:
    """None for a model that has no usable config.json yet, which the checks that follow refuse."""
    try:
        return policy_shape(config)
    except PreflightError:
        return None


def _nodes(
    config: RunConfig, address: str | None, short: str | None, file: Path | None
) -> tuple[str, tuple[PlannedNode, ...]]:
    given = [name for name, value in (("--address", address), ("--nodes", short), ("--cluster", file)) if value]
    if len(given) > 1:
        raise PreflightError(f"{' and '.join(given)} each name a cluster: give one of them")
    if address is not None:
        with connected(address):
            return f"the cluster at {address}", joined_nodes()
    if short is not None:
        return short, described_nodes(short)
    if file is not None:
        return f"the cluster of {file}", read_cluster(file)
    return "this machine", (this_node(config.resources),)
