"""Cores, memory and GPUs of this machine, as far as the operating system reports them without loading a backend."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from cluster.runtime.placement import NodeResources
from cluster.runtime.usage import MIB, NvidiaGpus
from configs.schema import ResourcesConfig

MEMORY_FILE = Path("/proc/meminfo")
CPU_FILE = Path("/proc/cpuinfo")
SHARED_MEMORY = Path("/dev/shm")
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Machine:
    """One machine's means. Cores are those that this process may use, which a container can make fewer."""

    num_cores: int
    num_gpus: int
    available_memory_bytes: int
    shared_memory_bytes: int  # free in /dev/shm, where the object store lives
    cpu_flags: frozenset[str]
    total_memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None  # of the smallest GPU; None without one


def this_machine() -> Machine:
    meminfo = MEMORY_FILE.read_text()
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        num_gpus=_num_gpus(),
        available_memory_bytes=_memory_bytes(meminfo, "MemAvailable"),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        cpu_flags=_cpu_flags(CPU_FILE.read_text()),
        total_memory_bytes=_memory_bytes(meminfo, "MemTotal"),
        gpu_memory_bytes=_gpu_memory_bytes(),
    )


def as_node(machine: Machine, resources: ResourcesConfig) -> NodeResources:
    """The one node of a cluster that a run starts here: `resources.num_cpus` of its cores, or all of them."""
    num_cpus = min(resources.num_cpus, machine.num_cores) if resources.num_cpus else machine.num_cores
    return NodeResources("this machine", num_cpus=num_cpus, num_gpus=machine.num_gpus)


def _num_gpus() -> int:
    """NVIDIA GPUs that the driver shows, or as many of them as CUDA_VISIBLE_DEVICES lists."""
    present = len(list(GPU_FOLDER.iterdir())) if GPU_FOLDER.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))


def _memory_bytes(meminfo: str, name: str) -> int:
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(fields[name].split()[0]) * 1024


def _gpu_memory_bytes() -> int | None:
    gpus = NvidiaGpus(os.environ)
    try:
        return min((int(reading.memory_total_mib * MIB) for reading in gpus.read()), default=None)
    finally:
        gpus.close()


def _cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The instruction sets of the first core; x86 calls them flags, ARM calls them Features."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
