"""`mobula plan`: the memory of a run, and settings with which it would fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import PlanRow, needed_roles, plan_placement, plan_table
from mobula.configs.load import resolved
from mobula.configs.overrides import groups, merge, own_values
from mobula.configs.rules import checked
from mobula.configs.schema import ResourcesConfig, RunConfig, SamplerKind
from mobula.deploy.host.authentication import connected
from mobula.deploy.planning.clusters import PlannedNode, described_nodes, joined_nodes, read_cluster, this_node
from mobula.deploy.planning.fit import GIB, Demand, EngineSizes, MemoryPlan, plan_memory
from mobula.deploy.planning.memory import policy_shape, refuse_small_cache, sequence_bytes
from mobula.deploy.planning.workers import USABLE
from mobula.learner.policies.shapes import ModelShape

NUM_SHOWN = 3
MOST_TOGETHER = 4  # settings in one proposal
LEAST_SEQUENCES = 4  # of the longest length, in a KV cache that is proposed
ADAPTER_RANK = 16
Setting = Mapping[str, Any]  # key -> value, or group -> option


def remedies(
    config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode], roles: Sequence[str] | None = None
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
            if _fits(config, shape, nodes, merged, roles):
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


def _fits(
    config: RunConfig,
    shape: ModelShape,
    nodes: Sequence[PlannedNode],
    setting: Setting,
    roles: Sequence[str] | None,
) -> bool:
    try:
        return not plan_memory(changed(config, setting), shape, nodes, roles).shortfalls
    except (ValueError, PreflightError):  # the sections contradict, or the model lacks what the setting names
        return False


def _settings(config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode]) -> Iterator[Setting]:
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
    least = LEAST_SEQUENCES * sequence_bytes(config, shape, config.sampler.max_model_len)
    shares = (config.sampler.vllm.kv_cache_bytes // n for n in (2, 4, 8) if config.sampler.kind is SamplerKind.VLLM)
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
    if shape.vision is not None and not config.policy.freeze:
        yield {"policy.freeze": ("visual.",)}
    if not (config.policy.lora.is_on or is_service):
        yield {"policy.lora.rank": ADAPTER_RANK}


def _of_roles(config: RunConfig, nodes: Sequence[PlannedNode]) -> Iterator[Setting]:
    learner, resources = config.learner, config.resources
    for preset in _presets(resources):
        counted = {"resources.num_nodes": len(nodes)} if "num_nodes" in _own(preset) else {}
        yield {"resources": preset, **counted}
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


def _presets(resources: ResourcesConfig) -> Iterator[str]:
    """Presets of the same device that start or use the same cluster, those with two names once."""
    seen = [_own(resources.preset)] if resources.preset in groups()["resources"] else []
    for preset in groups()["resources"]:
        values = _own(preset)
        if values.get("device", "cpu") == resources.device and "address" not in values and values not in seen:
            seen.append(values)
            yield preset


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
            f"{row.num_gpus:g}",
            str(row.num_threads),
            cores or "not bound",
        )
    return table


def memory_table(plan: MemoryPlan, device: str) -> Table:
    """Returns a table of GiB per worker, one column per role, 80 characters wide. Parts do not sum to the peak, because
    they do not coexist."""
    title = f"GiB of one worker, estimated; on {'its GPU' if device == 'cuda' else 'its node'}, and in host memory"
    table = Table("", *plan.by_role, title=title)
    largest = [memory.largest for memory in plan.by_role.values()]
    for part in PARTS:
        table.add_row(part.replace("_", " "), *(_gib(parts.get(part, 0)) for parts in largest))
    rest = [sum(size for name, size in parts.items() if name not in PARTS) for parts in largest]
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


def refuse_shortfalls(config: RunConfig, shape: ModelShape, nodes: Sequence[PlannedNode], plan: MemoryPlan) -> None:
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
) -> None:
    """Print the plan for the cluster at `address`, a described one, or this machine."""
    location, nodes = _nodes(config, address, short, file)
    placement = plan_placement(config.resources, [node.resources for node in nodes], needed_roles(config))
    console.print(as_table(plan_table(placement), title=f"resources={config.resources.preset}"))
    shape = policy_shape(config)
    if shape is None:
        console.print(f"{len(placement.workers)} workers fit {location}. Memory is planned once policy.model is named.")
        return
    refuse_small_cache(config, shape)
    plan = plan_memory(config, shape, nodes)
    console.print(memory_table(plan, config.resources.device))
    console.print(demand_table(plan.demands))
    refuse_shortfalls(config, shape, nodes, plan)
    unknown = "" if all(d.available is not None for d in plan.demands) else " as far as memories are known"
    console.print(
        f"{len(placement.workers)} workers fit {location}{unknown}. Figures are estimates; no GPU has run yet."
    )


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
    shape = _known_shape(config)
    if shape is not None:
        refuse_small_cache(config, shape)


def _known_shape(config: RunConfig) -> ModelShape | None:
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
