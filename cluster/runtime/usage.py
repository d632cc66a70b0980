"""Reads the CPU, memory and GPU use of a process tree."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from mobula.cluster.runtime.vitals import EngineLoad, Vitals

MIB = 1 << 20


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; values that the driver does not report are None."""

    name: str
    memory_total_mib: float
    memory_used_mib: float
    utilization_percent: float | None


class NvidiaGpus:
    """Reads the NVIDIA GPUs visible in an environment through NVML; none without a driver.

    CUDA_VISIBLE_DEVICES may hold numbers or UUIDs. Numbers are in bus order, which is also CUDA's order if the GPUs are
    equal or CUDA_DEVICE_ORDER=PCI_BUS_ID is set. MIG slices are left out: NVML reports no utilisation for them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._devices: list[Any] = []
        self._is_open = _open_nvml()
        if not self._is_open:
            return
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(device) for device in devices]
        self._devices = [devices[index] for index in visible(environment.get("CUDA_VISIBLE_DEVICES"), uuids)]

    def read(self) -> list[GpuReading]:
        return [self._reading(device) for device in self._devices]

    def close(self) -> None:
        if self._is_open:
            pynvml.nvmlShutdown()
            self._is_open = False

    @staticmethod
    def _reading(device: Any) -> GpuReading:
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        try:
            utilization = float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
        except pynvml.NVMLError_NotSupported:
            utilization = None
        name = pynvml.nvmlDeviceGetName(device)
        return GpuReading(name, memory.total / MIB, memory.used / MIB, utilization)


def visible_gpus(environment: Mapping[str, str]) -> list[GpuReading]:
    with closing(NvidiaGpus(environment)) as gpus:
        return gpus.read()


def driver_version() -> str:
    """Returns the version of the NVIDIA driver; empty without a driver."""
    if not _open_nvml():
        return ""
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _open_nvml() -> bool:
    """Opens NVML; returns False on a machine without an NVIDIA driver."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return False
    return True


def visible(listed: str | None, uuids: Sequence[str]) -> list[int]:
    """Returns the indices of the GPUs (with these UUIDs) that CUDA_VISIBLE_DEVICES=`listed` shows, in its order.

    None shows all GPUs. As in CUDA, a UUID may be abbreviated, and the list ends at the first entry without a GPU.
    """
    if listed is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in (entry.strip() for entry in listed.split(",")):
        if entry.isdecimal():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        shown += matches
    return shown


class ProcessTree:
    """A process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[psutil.Process, float] = {}  # a Process differs from a later process with the same id
        self._seconds, _ = self._measure()
        self._read_at = time.monotonic()

    def read(self) -> tuple[float, float] | None:
        """Returns percent of one core since the last reading and resident MiB; None once the process is gone.

        Processes that started and ended between two readings are missed. Shared memory counts for each process.
        """
        before, before_at = self._seconds, self._read_at
        self._seconds, resident_mib = self._measure()
        self._read_at = time.monotonic()
        if not self._seconds:
            return None
        spent_s = sum(seconds - before.get(process, 0.0) for process, seconds in self._seconds.items())
        return 100.0 * spent_s / max(self._read_at - before_at, 1e-3), resident_mib

    def _measure(self) -> tuple[dict[psutil.Process, float], float]:
        seconds: dict[psutil.Process, float] = {}
        resident = 0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return {}, 0.0
        for process in processes:
            try:
                times, memory = process.cpu_times(), process.memory_info()
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # the process ended, or its id was reused
                continue
            seconds[process] = times.user + times.system
            resident += memory.rss
        return seconds, resident / MIB


class VitalsMeter:
    """Measures this process, its children and its visible GPUs; each reading covers the time since the last one."""

    def __init__(self, node: str, num_threads: int, gpus: NvidiaGpus | None = None) -> None:
        """`node` is the address of this node, `num_threads` the planned threads of the process."""
        self._node = node
        self._num_threads = num_threads
        self._tree = ProcessTree(os.getpid())
        self._gpus = NvidiaGpus(os.environ) if gpus is None else gpus
        self._num_tokens, self._read_at = 0, time.monotonic()

    def read(self, load: EngineLoad | None) -> Vitals:
        """`load` is the load of the worker's engine, if it has one."""
        used, gpus = self._tree.read(), self._gpus.read()
        now, tokens_per_s = time.monotonic(), None
        if load is not None:
            tokens_per_s = (load.num_tokens - self._num_tokens) / max(now - self._read_at, 1e-3)
            self._num_tokens = load.num_tokens
        self._read_at = now
        shares = [gpu.utilization_percent / 100 for gpu in gpus if gpu.utilization_percent is not None]
        return Vitals(
            node=self._node,
            pid=os.getpid(),
            rss_bytes=None if used is None else int(used[1] * MIB),
            busy_share=None if used is None else min(1.0, used[0] / 100 / self._num_threads),
            gpu_bytes=int(sum(gpu.memory_used_mib for gpu in gpus) * MIB) if gpus else None,
            gpu_busy_share=sum(shares) / len(shares) if shares else None,
            load=load,
            tokens_per_s=tokens_per_s,
        )
