"""Nodes of a plan: this machine, or a described cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import NodeResources
from mobula.deploy.host.cuda import CudaSoftware

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
    """Nodes of one kind in a cluster file."""

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
    """The nodes of a short description, e.g. `2x8x80GB`.

    Raises:
        PreflightError: it cannot be read.
    """
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
    """The nodes of a cluster file.

    Raises:
        PreflightError: it cannot be read, or holds something else.
    """
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
    """Parses a size such as 80GB (10^9) or 80GiB (2^30) as bytes.

    Raises:
        PreflightError: the text is no size.
    """
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
