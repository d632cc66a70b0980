"""Cores, memory, temporary folders and checkouts of this machine."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import NodeResources
from mobula.cluster.runtime.usage import MIB, visible_gpus
from mobula.configs.schema import ResourcesConfig

VARIABLES = ("RAY_TMPDIR", "TMPDIR")  # as Ray reads them


FALLBACK = Path("/tmp")


SOCKET_BYTES = 107  # of the path of a Unix socket


# Below the folder: /ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store
RAY_BYTES = 72


MIN_FREE_BYTES = 32 << 20  # Ray's processes write their logs there; without space they do not start, and do not say so


GIT_S = 30.0


_logger = logging.getLogger(__name__)


def ray_folder(environment: Mapping[str, str], fallback: Path = FALLBACK) -> Path | None:
    """Returns None if Ray's default works; else a folder below /tmp, with a warning that names the variable."""
    variable = next((name for name in VARIABLES if name in environment), None)
    unfit = _fault(str(fallback))
    given = "" if variable is None else environment[variable]
    fault = unfit if variable is None else _fault(given)
    if fault is None:
        return None
    if unfit is not None:
        named = "" if variable is None else f"{variable}={given} {fault}, and "
        raise PreflightError(
            f"{named}{fallback} {unfit}: free the disk, or set RAY_TMPDIR to a short path that can be written"
        )
    _logger.warning("%s=%s %s: Ray's session is in %s/ray", variable, given, fault, fallback)
    return fallback / "ray"


def _fault(folder: str) -> str | None:
    """Returns the reason why Ray cannot use a folder; None if it can."""
    most = SOCKET_BYTES - RAY_BYTES
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        return "is no folder that can be written"
    if len(os.fsencode(folder)) > most:
        return f"is longer than the {most} bytes that Ray's sockets leave"
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        return f"is on a disk with {free >> 20} MiB free, less than the {MIN_FREE_BYTES >> 20} MiB of Ray's logs"
    if not folder.isascii() or any(letter.isspace() for letter in folder):
        return "has letters that Ray's processes do not take"
    return None


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


def commit_of(checkout: Path, *options: str) -> str:
    """Returns the commit of a checkout as `git rev-parse` with `options` prints it, with `+` if tracked files differ
    from it; empty outside a checkout."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, timeout=GIT_S)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", *options, "HEAD")
    return commit + ("+" if commit and git("status", "--porcelain", "--untracked-files=no") else "")
