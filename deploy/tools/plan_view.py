"""What `mobula plan` looks at and shows: the nodes there are, and the placement as a table."""

from __future__ import annotations

import socket

from rich.table import Table

from cluster.errors import PreflightError
from cluster.runtime.placement import NodeResources, PlanRow
from configs.schema import RunConfig
from deploy.host.machine import as_node, this_machine

KNOCK_TIMEOUT_S = 5


def nodes_at(config: RunConfig, address: str | None) -> tuple[NodeResources, ...]:
    """What there is to plan for: this machine alone, or the running cluster at `address`."""
    if address is None:
        return (as_node(this_machine(), config.resources),)
    import deploy.host.ray_defaults  # noqa: F401  isort: skip  (sets what ray reads when imported)
    import ray

    from cluster.runtime.placement_groups import cluster_nodes

    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"no Ray cluster answers at {address} ({error}): give --address HOST:PORT of one that runs, or leave it out"
        ) from error
    try:
        return cluster_nodes()
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would try for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()


def as_table(rows: list[PlanRow], title: str) -> Table:
    table = Table("role", "node", "workers", "CPUs", "GPUs", "threads each", "cores", title=title)
    for row in rows:
        cores = " | ".join(",".join(str(core) for core in worker) for worker in row.cores if worker)
        table.add_row(
            row.role,
            row.node_id,
            str(row.num_workers),
            f"{row.num_cpus:g}",
            f"{row.num_gpus:g}",
            str(row.num_threads),
            cores or "not bound",
        )
    return table
