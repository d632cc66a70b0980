"""`mobula plan`: the plan and its view."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import PlanRow, needed_roles, plan_placement, plan_table
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode, described_nodes, nodes_at, read_cluster, this_node
from mobula.deploy.planning.fit import GIB, Demand, EngineSizes, MemoryPlan, plan_memory
from mobula.deploy.planning.memory import policy_shape, refuse_small_cache
from mobula.deploy.planning.remedies import remedies
from mobula.deploy.planning.workers import USABLE
from mobula.learner.policies.shapes import ModelShape

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
    they do not coexist.
    """
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
    vLLM on GPUs, or where the model is not planned.
    """
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
        return f"the cluster at {address}", nodes_at(address)
    if short is not None:
        return short, described_nodes(short)
    if file is not None:
        return f"the cluster of {file}", read_cluster(file)
    return "this machine", (this_node(config.resources),)
