"""Existing nodes: this machine, or the nodes of a running Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mobula.configs.schema import ResourcesConfig
from mobula.deploy.host.authentication import connected
from mobula.deploy.host.cuda import CudaSoftware, examine
from mobula.deploy.host.machine import as_node, this_machine
from mobula.deploy.planning.clusters import GPU_MEMORY, PlannedNode

ANSWER_S = 180.0  # of one node: its process has to start and to import torch

_logger = logging.getLogger(__name__)


def this_node(resources: ResourcesConfig) -> PlannedNode:
    """The node of a cluster that a run starts here."""
    machine = this_machine()
    return PlannedNode(as_node(machine, resources), machine.gpu_memory_bytes, machine.total_memory_bytes)


def nodes_at(address: str) -> tuple[PlannedNode, ...]:
    """The nodes of the running cluster at `address`.

    Raises:
        PreflightError: none answers there.
    """
    with connected(address):
        return joined_nodes()


def joined_nodes() -> tuple[PlannedNode, ...]:
    """Returns the nodes of the connected cluster, with the CUDA software of nodes with GPUs.

    If the driver reports no GPU, the memory follows from Ray's accelerator type, if that type has a single size."""
    import ray

    from mobula.cluster.runtime.placement_groups import cluster_nodes

    rows = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    software = cuda_of([node_id for node_id, has in rows.items() if has.get("GPU", 0.0)])
    planned = []
    for node in cluster_nodes():
        has = rows[node.node_id]
        kinds = [name.removeprefix("accelerator_type:") for name in has if name.startswith("accelerator_type:")]
        named = min((GPU_MEMORY[kind] for kind in kinds if kind in GPU_MEMORY), default=None)
        host = has.get("memory", 0.0) + has.get("object_store_memory", 0.0)
        cuda = software.get(node.node_id)
        gpu = named if cuda is None or cuda.gpu_bytes is None else cuda.gpu_bytes
        planned.append(PlannedNode(node, gpu, int(host) or None, cuda))
    return tuple(planned)


def cuda_of(node_ids: Sequence[str]) -> dict[str, CudaSoftware]:
    """Examines each node's CUDA software in a task; omits nodes that do not answer within `ANSWER_S`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(examine)
    strategies = {node_id: NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids}
    calls = {look.options(scheduling_strategy=there).remote(): node_id for node_id, there in strategies.items()}
    done, late = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S) if calls else ([], [])
    for call in late:
        _logger.warning("node %s did not examine its GPUs within %g s", calls[call], ANSWER_S)
    software = {}
    for call in done:
        try:
            software[calls[call]] = ray.get(call)
        except ray.exceptions.RayError as error:
            _logger.warning("node %s cannot examine its GPUs: %s", calls[call], error)
    return software
