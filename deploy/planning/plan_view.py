"""The output of `mobula plan`: the placement, and the memory of every role, GPU and node."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import PlanRow
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode
from mobula.deploy.planning.fit import GIB, Demand, MemoryPlan
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
    """Name what is missing on each node and up to three settings with which it would fit.

    Raises:
        PreflightError: memory does not suffice.
    """
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
