"""Examines the CUDA software of a machine: driver, torch's build, and the compiler that Triton calls.

    python -m mobula.deploy.host.cuda

prints the result as JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.usage import MIB, driver_version, visible_gpus
from mobula.deploy.host.machine import SHARED_MEMORY

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
    """A reason why a run on GPUs would fail, and the next action."""

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
    command = [sys.executable, "-m", "mobula.deploy.host.cuda"]
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


def flaws(software: CudaSoftware) -> list[Flaw]:
    """Returns every reason why a run on this machine's GPUs would fail."""
    checks = (_driver, _torch, _compiler, _headers, _shared_memory)
    return [flaw for check in checks if (flaw := check(software)) is not None]


def refuse_flaws(machines: Mapping[str, CudaSoftware]) -> None:
    """Raises:
    PreflightError: a run on the GPUs of one of these machines would fail; the message has every reason.
    """
    lines = [
        f"{name}: {flaw.title}: {flaw.detail}: {flaw.action}"
        for name, software in machines.items()
        for flaw in flaws(software)
    ]
    if lines:
        raise PreflightError("a run on GPUs would fail here:\n" + "\n".join(f"  {line}" for line in lines))


def _driver(software: CudaSoftware) -> Flaw | None:
    if software.driver and software.gpus:
        return None
    if not software.driver:
        action = "install the NVIDIA driver, or start the container with its GPUs (docker run --gpus all)"
        return Flaw("NVIDIA driver", "none answers", action)
    return Flaw("NVIDIA driver", f"{software.driver} shows no GPU", "look at CUDA_VISIBLE_DEVICES and nvidia-smi")


def _torch(software: CudaSoftware) -> Flaw | None:
    if software.torch_gpus >= len(software.gpus) or not software.driver:
        return None
    if not software.torch_cuda:
        action = "install the gpu extra: remove .venv and run `make environment` on a machine whose nvidia-smi answers"
        return Flaw("torch", f"{software.torch} is built without CUDA", action)
    detail = (
        f"{software.torch} for CUDA {software.torch_cuda} can use {software.torch_gpus} of {len(software.gpus)} GPUs"
    )
    least = LEAST_DRIVER.get(int(software.torch_cuda.partition(".")[0]), 0)
    if major_of(software.driver) < least:
        action = f"install a driver of version {least} or later, or NVIDIA's package cuda-compat"
        return Flaw("torch", f"{detail} with driver {software.driver}", action)
    return Flaw("torch", detail, "run `python -c 'import torch; torch.zeros(1).cuda()'` to see why")


def _compiler(software: CudaSoftware) -> Flaw | None:
    if software.compiler:
        return None
    action = "install one (apt-get install gcc), or name it in CC"
    return Flaw("C compiler", "none, and Triton compiles for every kernel at run time", action)


def _headers(software: CudaSoftware) -> Flaw | None:
    if software.headers:
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    action = f"install them (apt-get install python{version}-dev), or make the environment with uv's Python"
    return Flaw("Python.h", "missing, and what Triton compiles includes it", action)


def _shared_memory(software: CudaSoftware) -> Flaw | None:
    if software.shared_memory_bytes >= LEAST_SHARED_MEMORY:
        return None
    detail = f"{software.shared_memory_bytes / MIB:.0f} MiB, through which NCCL and the processes of an engine exchange"
    return Flaw(str(SHARED_MEMORY), detail, "enlarge it (docker run --shm-size=16g, an emptyDir of medium Memory)")


def major_of(driver: str) -> int:
    """Parses the major version: 580 of 580.65.06."""
    match = re.match(r"\d+", driver)
    return int(match[0]) if match else 0


def main() -> None:
    sys.stdout.write(json.dumps(asdict(examine())) + "\n")


if __name__ == "__main__":
    main()
