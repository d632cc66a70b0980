"""Cores, memory and GPUs of this machine, as far as the operating system reports them without loading a backend."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from mobula.cluster.runtime.placement import NodeResources
from mobula.cluster.runtime.usage import MIB, visible_gpus
from mobula.configs.schema import ResourcesConfig

MEMORY_FILE = Path("/proc/meminfo")
CPU_FILE = Path("/proc/cpuinfo")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Machine:
    """Resources of one machine. Cores are the cores available to this process; a container may restrict them."""

    num_cores: int
    num_gpus: int
    available_memory_bytes: int
    shared_memory_bytes: int  # free in /dev/shm, where the object store lives
    cpu_flags: frozenset[str]
    total_memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None  # of the smallest GPU; None without one


def this_machine() -> Machine:
    meminfo = MEMORY_FILE.read_text()
    gpus = [int(gpu.memory_total_mib * MIB) for gpu in visible_gpus(os.environ)]  # /proc lists none in WSL2 and gVisor
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        num_gpus=len(gpus),
        available_memory_bytes=_memory_bytes(meminfo, "MemAvailable"),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        cpu_flags=_cpu_flags(CPU_FILE.read_text()),
        total_memory_bytes=_memory_bytes(meminfo, "MemTotal"),
        gpu_memory_bytes=min(gpus, default=None),
    )


def as_node(machine: Machine, resources: ResourcesConfig) -> NodeResources:
    """Returns the node of a private cluster: `resources.num_cpus` of the machine's cores, or all."""
    num_cpus = min(resources.num_cpus, machine.num_cores) if resources.num_cpus else machine.num_cores
    return NodeResources("this machine", num_cpus=num_cpus, num_gpus=machine.num_gpus)


def _memory_bytes(meminfo: str, name: str) -> int:
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(fields[name].split()[0]) * 1024


def _cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Returns the instruction sets of the first core: `flags` on x86, `Features` on ARM."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
