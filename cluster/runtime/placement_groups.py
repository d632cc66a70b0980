"""Reserves a placement plan on a Ray cluster: placement groups with a deadline, pinned to the planned nodes.

Bundles cannot be added to a placement group later, so each worker of a scalable role has a separate group. The learner
ranks share one group, because they start and end together.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import ray
from ray._private.state import available_resources_per_node  # the public API has only the sum of the cluster
from ray._private.state import state as control_store  # the public API does not list dead drivers
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]  # generated on import
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime.placement import TOGETHER, NodeResources, PlacedWorker, PlacementPlan, plan_placement
from mobula.configs.schema import ResourcesConfig, WorkerResources

PLAN_INTERVAL_S = 0.5
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Booking:
    """Reservation of one worker's resources, for `mobula.cluster.runtime.ray_actors.spawn`."""

    group: PlacementGroup
    bundle_index: int


def cluster_nodes() -> tuple[NodeResources, ...]:
    """Returns the free resources of every live node of the connected cluster."""
    free = available_resources_per_node()
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    return tuple(
        replace(_resources(nodes[node_id], free[node_id]), all_cpus=nodes[node_id]["Resources"].get("CPU", 0.0))
        for node_id in sorted(nodes)
    )


def node_name(node: Mapping[str, Any]) -> str:
    """Returns `HOSTNAME (IP)` of a row of `ray.nodes()`."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def plan_when_free(config: ResourcesConfig, roles: Sequence[str], *, wait_s: float) -> PlacementPlan:
    """Returns the plan for the connected cluster. Retries for `wait_s` if the cluster is full.

    Ray reports resources that another run has just released with a delay.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return plan_placement(config, cluster_nodes(), roles)
        except PlacementError as error:
            if time.monotonic() > deadline:
                raise PlacementError(f"{error}{_held()}") from error
        time.sleep(PLAN_INTERVAL_S)


def holders(names: Iterable[str]) -> dict[str, int]:
    """Returns run -> number of its groups, which are named `RUN/ROLE/INDEX/...`; other groups count by their name."""
    return dict(Counter(name.partition("/")[0] for name in names if name))


def _held() -> str:
    rows = placement_group_table().values()
    runs = holders(row["name"] for row in rows if row["state"] in ("CREATED", "PENDING", "RESCHEDULING"))
    shown = ", ".join(f"{run} ({number} groups)" for run, number in runs.items())
    return f". What is not free is held by the runs {shown}" if shown else ""


def create_placement_groups(plan: PlacementPlan, *, run_name: str, timeout_s: float) -> Mapping[str, Booking]:
    """Reserves the resources of every worker on its planned node. Returns worker name -> booking."""
    bookings: dict[str, Booking] = {}
    groups: list[Sequence[PlacedWorker]] = [own for role in TOGETHER if (own := plan.of_role(role))]
    groups += [[worker] for worker in plan.workers if worker.role not in TOGETHER]
    for members in groups:
        group = placement_group(
            [bundle_of(worker) for worker in members],
            strategy="PACK",
            name=_group_name(f"{run_name}/{members[0].name}"),
            bundle_label_selector=[{NODE_LABEL: worker.node_id} for worker in members],
        )
        bookings.update({worker.name: Booking(group, index) for index, worker in enumerate(members)})
    deadline = time.monotonic() + timeout_s
    # The remaining time is rounded up, because Ray truncates it to whole seconds.
    pending = [
        name
        for name, booking in bookings.items()
        if not booking.group.wait(math.ceil(max(0.0, deadline - time.monotonic())))
    ]
    if pending:
        remove_placement_groups(bookings)
        raise PlacementError(
            f"waited {timeout_s:g} s for the cluster to reserve {', '.join(pending)}: something else holds the "
            "resources that the plan counted as free. Look for other runs with `ray status`, or raise timeouts.start_s"
        )
    return bookings


def book_more(
    workers: WorkerResources, number: int, *, name: str, timeout_s: float
) -> list[tuple[Booking, NodeResources]]:
    """Reserves the resources of `number` workers on nodes with their labels: on as few nodes as possible, or spread.
    Returns the booking of each worker and all resources of its node.

    `name` is `RUN/ROLE/INDEX`. Unlike the workers of a plan they are not pinned to a node, because other runs reserve
    at the same time.
    """
    group = placement_group(
        [bundle_of(workers)] * number,
        strategy="SPREAD" if workers.strategy == "spread" else "PACK",
        name=_group_name(name),
        bundle_label_selector=[dict(workers.node_labels)] * number if workers.node_labels else None,
    )
    bookings = [Booking(group, index) for index in range(number)]
    if not group.wait(math.ceil(timeout_s)):
        remove_placement_groups({name: bookings[0]})
        raise PlacementError(
            f"waited {timeout_s:g} s for the cluster to reserve {name} ({number} x {bundle_of(workers)}): "
            "something else took what was free a moment ago. Look for other runs with `ray status`, and ask again"
        )
    nodes = placement_group_table(group)["bundles_to_node_id"]
    rows = {node["NodeID"]: node for node in ray.nodes()}
    found = [rows[nodes[booking.bundle_index]] for booking in bookings]
    return [(booking, _resources(node, node["Resources"])) for booking, node in zip(bookings, found, strict=True)]


def _resources(node: Mapping[str, Any], has: Mapping[str, float]) -> NodeResources:
    """Returns a row of `ray.nodes()` with the resources `has`, all or the free ones."""
    labels = tuple(sorted(node.get("Labels", {}).items()))
    cpus, gpus = has.get("CPU", 0.0), has.get("GPU", 0.0)
    ours = ("CPU", "GPU", "memory", "object_store_memory")  # and Ray's own markers are no custom resources
    custom = tuple(
        (name, amount)
        for name, amount in sorted(has.items())
        if name not in ours and not name.startswith(("node:", "accelerator_type:", "bundle_")) and "_group_" not in name
    )
    return NodeResources(node["NodeID"], cpus, gpus, name=node_name(node), custom=custom, labels=labels)


def bundle_of(worker: PlacedWorker | WorkerResources) -> dict[str, float]:
    custom = dict(worker.custom) if isinstance(worker, PlacedWorker) else dict(worker.custom_resources)
    return {"CPU": worker.num_cpus, **({"GPU": worker.num_gpus} if worker.num_gpus else {}), **custom}


def remove_placement_groups(bookings: Mapping[str, Booking]) -> None:
    """Removes all groups. Ray kills actors that still run in them."""
    for group in {booking.group.id: booking.group for booking in bookings.values()}.values():
        remove_placement_group(group)


def groups_of_dead_drivers() -> list[tuple[str, str]]:
    """Returns id and name of every placement group whose driver is dead.

    Ray removes such groups after a delay. A group that stays listed is a leftover.
    """
    table = control_store._connect_and_get_accessor().get_placement_group_table()
    rows = (PlacementGroupTableData.FromString(row) for row in table)
    return [
        (row.placement_group_id.hex(), row.name)
        for row in rows
        if row.creator_job_dead and row.state != PlacementGroupTableData.REMOVED
    ]


def remove_group(group_id: str) -> None:
    """Removes the group with this id. Any process may have created it."""
    remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


def _group_name(name: str) -> str:
    """Makes a unique name: Ray refuses duplicates, and groups of a killed run are removed with a delay."""
    return f"{name}/{uuid4().hex[:8]}"
