"""`mobula plan`: the placement of a configuration on nodes that are there or only described, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import needed_roles, plan_placement, plan_table
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode, described_nodes, read_cluster
from mobula.deploy.planning.engine_sizes import EngineSizes
from mobula.deploy.planning.fit import MemoryPlan, plan_memory
from mobula.deploy.planning.kv_cache import refuse_small_cache
from mobula.deploy.planning.nodes import nodes_at, this_node
from mobula.deploy.planning.plan_view import as_table, demand_table, memory_table, refuse_shortfalls
from mobula.deploy.planning.policy_shape import policy_shape
from mobula.learner.policies.shapes import ModelShape


def make_plan(config: RunConfig, *, short: str | None = None, file: Path | None = None) -> MemoryPlan:
    """The placement and the memory of a run on described nodes, or on this machine.

    Raises:
        PreflightError: CPUs, GPUs or memory do not suffice, or `policy.model` is not set.
    """
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
    """Print the plan for the cluster at `address`, a described one, or this machine.

    Raises:
        PreflightError: CPUs, GPUs or memory do not suffice; what would do is in the message.
    """
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

    Raises:
        PreflightError: training does not fit; three settings with which it would are in the message.
    """
    shape = _known_shape(config)
    if shape is None:
        return None
    plan = plan_memory(config, shape, nodes, roles)
    if "learner" in roles:
        refuse_shortfalls(config, shape, nodes, plan)
    return plan.engine


def refuse_too_small_cache(config: RunConfig) -> None:
    """Before a run loads anything: whether the KV cache of an engine holds one sequence.

    Raises:
        PreflightError: it does not; the bytes with which it would are in the message.
    """
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
