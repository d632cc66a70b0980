"""Samples the CPU, memory and GPU use of a process tree on a thread: averages and peaks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import psutil
import pynvml

from mobula.cluster.runtime.vitals import EngineLoad, Vitals

MIB = 1 << 20


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; values that the driver does not report are None."""

    index: int  # of the driver, in bus order, independent of CUDA_VISIBLE_DEVICES
    name: str
    memory_total_mib: float
    memory_used_mib: float
    utilization_percent: float | None
    power_w: float | None


@dataclass
class RunningStats:
    """Average and peak of a stream of numbers."""

    num: int = 0
    total: float = 0.0
    peak: float = 0.0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.peak = value if self.num == 0 else max(self.peak, value)
            self.num += 1
            self.total += value

    def summary(self) -> dict[str, float] | None:
        """Returns average and peak; None without any number."""
        return {"avg": round(self.total / self.num, 3), "max": round(self.peak, 3)} if self.num else None


@dataclass
class _GpuSeries:
    first: GpuReading
    memory_used_mib: RunningStats = field(default_factory=RunningStats)
    utilization_percent: RunningStats = field(default_factory=RunningStats)
    power_w: RunningStats = field(default_factory=RunningStats)

    def summary(self) -> dict[str, Any]:
        return {
            "index": self.first.index,
            "name": self.first.name,
            "memory_total_mib": round(self.first.memory_total_mib, 3),
            "memory_used_mib": self.memory_used_mib.summary(),
            "utilization_percent": self.utilization_percent.summary(),
            "power_w": self.power_w.summary(),
        }


class NvidiaGpus:
    """The NVIDIA GPUs that processes with this environment see, read through NVML; none without a driver.

    CUDA_VISIBLE_DEVICES may hold numbers or UUIDs. Numbers are in bus order, which is also CUDA's order if the GPUs are
    equal or CUDA_DEVICE_ORDER=PCI_BUS_ID is set. MIG slices are left out: NVML reports no utilisation for them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._devices: list[tuple[int, Any]] = []
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
            self._is_open = False
            return
        self._is_open = True
        devices = [(index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(device) for _, device in devices]
        self._devices = [devices[index] for index in visible(environment.get("CUDA_VISIBLE_DEVICES"), uuids)]

    def read(self) -> list[GpuReading]:
        return [self._reading(index, device) for index, device in self._devices]

    def close(self) -> None:
        if self._is_open:
            pynvml.nvmlShutdown()
            self._is_open = False

    @staticmethod
    def _reading(index: int, device: Any) -> GpuReading:
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        try:
            utilization = float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
        except pynvml.NVMLError_NotSupported:
            utilization = None
        try:
            power_w = pynvml.nvmlDeviceGetPowerUsage(device) / 1000.0
        except pynvml.NVMLError_NotSupported:
            power_w = None
        name = pynvml.nvmlDeviceGetName(device)
        return GpuReading(index, name, memory.total / MIB, memory.used / MIB, utilization, power_w)


def driver_version() -> str:
    """Returns the version of the NVIDIA driver; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ""
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


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
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile, or its id has another owner
                continue
            seconds[process] = times.user + times.system
            resident += memory.rss
        return seconds, resident / MIB


class UsageSampler:
    """Samples a process tree and GPUs every `period_s` between `start` and `stop`, or inside a `with`.

    Example:
        with UsageSampler(os.getpid(), period_s=0.5) as usage:
            work()
        report["usage"] = usage.summary()
    """

    def __init__(self, pid: int, period_s: float, gpus: NvidiaGpus | None = None) -> None:
        if period_s <= 0:
            raise ValueError(f"a sampling period of {period_s:g} s is none: give seconds above 0")
        self._period_s = period_s
        self._tree = ProcessTree(pid)
        self._gpus = NvidiaGpus(os.environ) if gpus is None else gpus
        self._cpu_percent, self._memory_mib = RunningStats(), RunningStats()
        self._gpu_series: dict[int, _GpuSeries] = {}
        self._num_samples = 0
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Takes a last sample and ends the thread.

        Raises:
            Exception: the error that ended the sampling early, e.g. a GPU that fell off its bus.
        """
        self._is_over.set()
        self._thread.join()
        self._gpus.close()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def summary(self) -> dict[str, Any]:
        """Returns the figures for JSON; call it after `stop`. A figure is null if nothing could be read."""
        return {
            "period_s": self._period_s,
            "num_samples": self._num_samples,
            "cpu_percent_of_one_core": self._cpu_percent.summary(),
            "memory_resident_mib": self._memory_mib.summary(),
            "gpus": [series.summary() for series in self._gpu_series.values()],
        }

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._period_s):
                self._sample()
            self._sample()
        except Exception as error:  # `stop` raises it
            self._error = error

    def _sample(self) -> None:
        self._num_samples += 1
        if (used := self._tree.read()) is not None:
            self._cpu_percent.add(used[0])
            self._memory_mib.add(used[1])
        for reading in self._gpus.read():
            series = self._gpu_series.setdefault(reading.index, _GpuSeries(reading))
            series.memory_used_mib.add(reading.memory_used_mib)
            series.utilization_percent.add(reading.utilization_percent)
            series.power_w.add(reading.power_w)


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
