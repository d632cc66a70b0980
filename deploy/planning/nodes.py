"""The nodes that there are: this machine, or those of a running Ray cluster."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import PreflightError
from configs.schema import ResourcesConfig
from deploy.host.machine import as_node, this_machine
from deploy.planning.clusters import GPU_MEMORY, PlannedNode

KNOCK_TIMEOUT_S = 5


def this_node(resources: ResourcesConfig) -> PlannedNode:
    """The node of a cluster that a run starts here."""
    machine = this_machine()
    return PlannedNode(as_node(machine, resources), machine.gpu_memory_bytes, machine.total_memory_bytes)


def nodes_at(address: str) -> tuple[PlannedNode, ...]:
    """The nodes of the running cluster at `address`.

    Raises:
        PreflightError: none answers there.
    """
    with connected_to(address):
        return joined_nodes()


@contextmanager
def connected_to(address: str) -> Iterator[None]:
    """This process is a driver of the running cluster at `address` while the body runs.

    Raises:
        PreflightError: none answers there.
    """
    import deploy.host.ray_defaults  # noqa: F401  isort: skip  (sets what ray reads when imported)
    import ray

    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"no Ray cluster answers at {address} ({error}): give --address HOST:PORT of a running cluster, or "
            "leave it out"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def joined_nodes() -> tuple[PlannedNode, ...]:
    """The nodes of the connected cluster. A GPU's memory follows from the kind that Ray names, where that is enough."""
    import ray

    from cluster.runtime.placement_groups import cluster_nodes

    rows = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    found = []
    for node in cluster_nodes():
        has = rows[node.node_id]
        kinds = [name.removeprefix("accelerator_type:") for name in has if name.startswith("accelerator_type:")]
        gpu = min((GPU_MEMORY[kind] for kind in kinds if kind in GPU_MEMORY), default=None)
        host = has.get("memory", 0.0) + has.get("object_store_memory", 0.0)
        found.append(PlannedNode(node, gpu, int(host) or None))
    return tuple(found)


def _knock(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would try for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()
