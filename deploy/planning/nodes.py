"""The nodes that there are: this machine, or those of a running Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from configs.schema import ResourcesConfig
from deploy.host.authentication import check_admission
from deploy.host.machine import as_node, this_machine
from deploy.planning.clusters import GPU_MEMORY, PlannedNode


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
        PreflightError: none answers there, or it does not admit this process.
    """
    check_admission(address)
    import ray

    ray.init(address=address, log_to_driver=False)
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
