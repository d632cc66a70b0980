"""This machine: cores, memory, temporary folders and CUDA software.

    python -m mobula.deploy.host.machine

prints the CUDA software as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import NodeResources
from mobula.cluster.runtime.usage import MIB, driver_version, visible_gpus
from mobula.configs.schema import ResourcesConfig

VARIABLES = ("RAY_TMPDIR", "TMPDIR")  # as Ray reads them
FALLBACK = Path("/tmp")
SOCKET_BYTES = 107  # of the path of a Unix socket

# Below the folder: /ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store
RAY_BYTES = 72
MIN_FREE_BYTES = 32 << 20  # Ray's processes write their logs there; without space they do not start, and do not say so
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
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


LEAST_DRIVER = {12: 525, 13: 580}  # by the major version of torch's CUDA; later minor versions run on it too
LEAST_SHARED_MEMORY = 2**30  # NCCL and the processes of an engine exchange through it; Docker gives 64 MiB
ANSWER_S = 180.0  # torch is imported


@dataclass(frozen=True)
class CudaSoftware:
    """GPUs, driver, torch build and compiler of one machine."""

    gpus: tuple[str, ...]  # names of those that CUDA_VISIBLE_DEVICES shows, by NVML
    gpu_bytes: int | None  # of the smallest; None without one
    driver: str  # its version; empty without one
    torch: str  # version of torch
    torch_cuda: str  # version of CUDA that torch is built for; empty for a build without CUDA
    torch_gpus: int  # that torch can use
    compiler: str  # path of the C compiler; empty without one
    headers: str  # folder of Python.h; empty without it
    shared_memory_bytes: int  # size of /dev/shm


@dataclass(frozen=True)
class Flaw:
    title: str
    detail: str
    action: str


def examine() -> CudaSoftware:
    """Examines this machine. Imports torch."""
    import torch

    readings = visible_gpus(os.environ)
    return CudaSoftware(
        gpus=tuple(reading.name for reading in readings),
        gpu_bytes=min((int(reading.memory_total_mib * MIB) for reading in readings), default=None),
        driver=driver_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        torch_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        compiler=c_compiler(os.environ),
        headers=python_headers(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
    )


def examine_apart() -> CudaSoftware:
    """Examines this machine in a child process, which isolates crashes and hangs of the driver."""
    command = [sys.executable, "-m", "mobula.deploy.host.machine"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise PreflightError(
            f"torch did not find out within {ANSWER_S:g} s which GPUs it can use: see whether nvidia-smi answers"
        ) from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise PreflightError(f"the GPUs of this machine cannot be examined ({last}): look at nvidia-smi") from error
    fields = json.loads(done.stdout.splitlines()[-1])
    return CudaSoftware(**{**fields, "gpus": tuple(fields["gpus"])})


def c_compiler(environment: Mapping[str, str]) -> str:
    """Returns Triton's compiler: `CC`, gcc or clang."""
    named = environment.get("CC")
    names = [named.split()[0]] if named and named.strip() else ["gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name, path=environment.get("PATH")))), "")


def python_headers() -> str:
    """Returns the directory of Python.h in Triton's search path."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    folder = Path(sysconfig.get_paths(scheme=scheme)["include"])
    return str(folder) if (folder / "Python.h").is_file() else ""


def flaws(software: CudaSoftware) -> Iterator[Flaw]:
    """Yields every reason why a run on this machine's GPUs would fail."""
    if not software.driver:
        action = "install the NVIDIA driver, or start the container with its GPUs (docker run --gpus all)"
        yield Flaw("NVIDIA driver", "none answers", action)
    elif not software.gpus:
        yield Flaw("NVIDIA driver", f"{software.driver} shows no GPU", "look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    if software.driver and software.torch_gpus < len(software.gpus):
        yield _torch(software)
    if not software.compiler:
        action = "install one (apt-get install gcc), or name it in CC"
        yield Flaw("C compiler", "none, and Triton compiles for every kernel at run time", action)
    if not software.headers:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        action = f"install them (apt-get install python{version}-dev), or make the environment with uv's Python"
        yield Flaw("Python.h", "missing, and what Triton compiles includes it", action)
    if software.shared_memory_bytes < LEAST_SHARED_MEMORY:
        size = f"{software.shared_memory_bytes / MIB:.0f} MiB"
        detail = f"{size}, through which NCCL and the processes of an engine exchange"
        yield Flaw(str(SHARED_MEMORY), detail, "enlarge it (docker run --shm-size=16g, an emptyDir of medium Memory)")


def refuse_flaws(machines: Mapping[str, CudaSoftware]) -> None:
    lines = [
        f"{name}: {flaw.title}: {flaw.detail}: {flaw.action}"
        for name, software in machines.items()
        for flaw in flaws(software)
    ]
    if lines:
        raise PreflightError("a run on GPUs would fail here:\n" + "\n".join(f"  {line}" for line in lines))


def _torch(software: CudaSoftware) -> Flaw:
    if not software.torch_cuda:
        action = "install the gpu extra: remove .venv and run `make environment` on a machine whose nvidia-smi answers"
        return Flaw("torch", f"{software.torch} is built without CUDA", action)
    detail = (
        f"{software.torch} for CUDA {software.torch_cuda} can use {software.torch_gpus} of {len(software.gpus)} GPUs"
    )
    least = LEAST_DRIVER.get(int(software.torch_cuda.partition(".")[0]), 0)
    major = re.match(r"\d+", software.driver)
    if (int(major[0]) if major else 0) < least:
        action = f"install a driver of version {least} or later, or NVIDIA's package cuda-compat"
        return Flaw("torch", f"{detail} with driver {software.driver}", action)
    return Flaw("torch", detail, "run `python -c 'import torch; torch.zeros(1).cuda()'` to see why")


def main() -> None:
    sys.stdout.write(json.dumps(asdict(examine())) + "\n")


if __name__ == "__main__":
    main()
