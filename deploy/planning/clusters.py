"""Nodes of a cluster that is planned."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import NodeResources
from mobula.configs.schema import ResourcesConfig
from mobula.deploy.host.machine import CudaSoftware, as_node, examine, this_machine

_logger = logging.getLogger(__name__)

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = re.compile(rf"^\s*(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})\s*$")
SHORT = re.compile(r"^(\d+)x(\d+)x([\d.]+\w+)(?::(\d+)x([\d.]+\w+))?$")
CPUS_PER_GPU = 12  # where a description does not say, and for a node without GPUs this many in all

GPU_MEMORY = {  # bytes by Ray's name of an accelerator, for those that exist in one size alone
    "T4": 16 * 10**9,
    "L4": 24 * 10**9,
    "L40S": 48 * 10**9,
    "A10": 24 * 10**9,
    "A10G": 24 * 10**9,
    "A100-40G": 40 * 10**9,
    "A100-80G": 80 * 10**9,
    "H100": 80 * 10**9,
    "H200": 141 * 10**9,
    "B200": 180 * 10**9,
}

HOW = (
    "write NODESxGPUSxMEMORY, as 2x8x80GB, or with CPUs and host memory 2x8x80GB:96x1024GB; --cluster FILE takes nodes "
    "that differ"
)


@dataclass(frozen=True)
class PlannedNode:
    """One node and its memory. None means unknown; unknown memory is not checked."""

    resources: NodeResources
    gpu_bytes: int | None  # of one GPU
    host_bytes: int | None
    cuda: CudaSoftware | None = None  # of a node with GPUs that was asked

    @property
    def node_id(self) -> str:
        return self.resources.node_id


class NodeKind(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    count: PositiveInt = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_memory: str | None = None
    cpus: PositiveInt
    memory: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    resources: dict[str, float] = Field(default_factory=dict)


class ClusterFile(BaseModel):
    """A cluster file: `nodes`, a list of kinds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: Annotated[list[NodeKind], Field(min_length=1)]


def described_nodes(text: str) -> tuple[PlannedNode, ...]:
    """The nodes of a short description, e.g. `2x8x80GB`."""
    match = SHORT.match(text)
    if match is None:
        raise PreflightError(f"--nodes {text} is no description of a cluster: {HOW}")
    count, gpus, gpu_memory, cpus, memory = match.groups()
    kind = NodeKind(
        name="node",
        count=int(count),
        gpus=int(gpus),
        gpu_memory=gpu_memory,
        cpus=int(cpus) if cpus else CPUS_PER_GPU * max(1, int(gpus)),
        memory=memory,
    )
    return tuple(_nodes(kind, f"--nodes {text}"))


def read_cluster(path: Path) -> tuple[PlannedNode, ...]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        kinds = ClusterFile.model_validate(content).nodes
    except OSError as error:
        raise PreflightError(f"--cluster {path} cannot be read ({error.strerror}): name a YAML file") from error
    except yaml.YAMLError as error:
        raise PreflightError(f"--cluster {path} is no YAML ({' '.join(str(error).split())})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PreflightError(
            f"--cluster {path}: {where}: {first['msg']}. A file has `nodes`, a list of entries with name, count, gpus, "
            "gpu_memory (80GB), cpus, memory (1TB), labels and resources"
        ) from error
    return tuple(node for kind in kinds for node in _nodes(kind, f"--cluster {path}"))


def size(text: str, where: str) -> int:
    """Parses a size such as 80GB (10^9) or 80GiB (2^30) as bytes."""
    match = SIZE.match(text)
    if match is None:
        raise PreflightError(f"{where}: {text!r} is no size: write a number and one of {', '.join(UNITS)}")
    return int(float(match[1]) * UNITS[match[2]])


def _nodes(kind: NodeKind, where: str) -> list[PlannedNode]:
    if kind.gpus and kind.gpu_memory is None:
        raise PreflightError(f"{where}: {kind.name} has {kind.gpus} GPUs and no gpu_memory: give it, as 80GB")
    gpu = size(kind.gpu_memory, where) if kind.gpus and kind.gpu_memory else None
    host = None if kind.memory is None else size(kind.memory, where)
    names = [kind.name] if kind.count == 1 else [f"{kind.name}-{index}" for index in range(kind.count)]
    labels = tuple(sorted(kind.labels.items()))
    custom = tuple(sorted(kind.resources.items()))
    return [
        PlannedNode(NodeResources(name, kind.cpus, kind.gpus, custom=custom, labels=labels), gpu, host)
        for name in names
    ]


ANSWER_S = 180.0  # of one node: its process has to start and to import torch


def this_node(resources: ResourcesConfig) -> PlannedNode:
    """The node of a cluster that a run starts here."""
    machine = this_machine()
    return PlannedNode(as_node(machine, resources), machine.gpu_memory_bytes, machine.total_memory_bytes)


def joined_nodes() -> tuple[PlannedNode, ...]:
    """Returns the nodes of the connected cluster, with the CUDA software of nodes with GPUs. Without a GPU of the
    driver, the memory follows from Ray's accelerator type, if that type has a single size."""
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
