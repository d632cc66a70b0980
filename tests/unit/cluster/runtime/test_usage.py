"""The usage sampler: a busy child counts, one that is gone does not, GPUs are those that the process sees."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from mobula.cluster.runtime.usage import GpuReading, NvidiaGpus, ProcessTree, RunningStats, UsageSampler, visible

BUSY = "import sys\nblock = bytearray(64 << 20)\nprint('on', flush=True)\nwhile True:\n    pass"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"
UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


class TwoGpus:
    """A driver with two GPUs; the second does not tell its power."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.is_closed = False
        self.was_read_twice = threading.Event()

    def read(self) -> Sequence[GpuReading]:
        self.num_reads += 1
        if self.num_reads == 2:
            self.was_read_twice.set()
        used = 100.0 * self.num_reads
        return [
            GpuReading(0, "first", 1000.0, used, 10.0 * self.num_reads, 50.0),
            GpuReading(3, "fourth", 2000.0, 7.0, None, None),
        ]

    def close(self) -> None:
        self.is_closed = True


class LostGpu(TwoGpus):
    """A driver that loses its GPUs."""

    def read(self) -> Sequence[GpuReading]:
        self.was_read_twice.set()
        raise RuntimeError("the GPU fell off the bus")


@pytest.mark.alone
def test_a_busy_grandchild_counts_with_its_time_and_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        tree = ProcessTree(parent.pid)
        child = None
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "on\n"
            (child,) = psutil.Process(parent.pid).children()
            before = os.times().elapsed
            while os.times().elapsed < before + 0.5:
                pass
            used = tree.read()
        finally:
            if child is not None:
                child.kill()
    assert used is not None
    cpu_percent, resident_mib = used
    assert cpu_percent > 10.0
    assert 64.0 < resident_mib < 400.0


def test_a_tree_whose_process_is_gone_gives_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        tree = ProcessTree(process.pid)
        process.communicate(b"\n")
    assert tree.read() is None


def test_averages_and_peaks_of_each_gpu() -> None:
    gpus = TwoGpus()
    with UsageSampler(os.getpid(), 0.01, gpus) as usage:
        assert gpus.was_read_twice.wait(60)
    summary = usage.summary()
    num = gpus.num_reads
    assert gpus.is_closed
    assert summary["num_samples"] == num
    first, fourth = summary["gpus"]
    assert first["memory_used_mib"] == {"avg": pytest.approx(50.0 * (num + 1), abs=1e-3), "max": 100.0 * num}
    assert first["utilization_percent"]["max"] == 10.0 * num
    assert first["power_w"] == {"avg": 50.0, "max": 50.0}
    assert (fourth["index"], fourth["utilization_percent"], fourth["power_w"]) == (3, None, None)
    assert summary["memory_resident_mib"]["max"] > 1.0


def test_what_stops_the_sampling_is_raised_and_not_lost() -> None:
    gpus = LostGpu()
    sampler = UsageSampler(os.getpid(), 0.01, gpus)
    sampler.start()
    assert gpus.was_read_twice.wait(60)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        sampler.stop()
    assert gpus.is_closed


def test_an_average_of_nothing_is_none() -> None:
    series = RunningStats()
    series.add(None)
    assert series.summary() is None
    series.add(-2.0)
    assert series.summary() == {"avg": -2.0, "max": -2.0}


def test_a_period_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="period of 0 s"):
        UsageSampler(os.getpid(), 0.0, TwoGpus())


@pytest.mark.parametrize(
    ("listed", "shown"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-bb33, 0", [2, 0]),
        ("GPU-b", [2]),
        ("GPU-aa", []),
        ("1,-1,2", [1]),
        ("0,7,1", [0]),
    ],
)
def test_visible_gpus_are_those_that_cuda_shows(listed: str | None, shown: list[int]) -> None:
    assert visible(listed, UUIDS) == shown


def test_a_driver_is_read_in_our_units_and_what_it_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_of(device: str) -> SimpleNamespace:
        if device == "slice":
            raise pynvml.NVMLError_NotSupported
        return SimpleNamespace(gpu=83)

    devices = ["card", "slice"]
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": devices.__getitem__,
        "nvmlDeviceGetUUID": lambda device: f"GPU-{device}",
        "nvmlDeviceGetName": lambda device: f"a {device}",
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(total=80 << 30, used=3 << 20),
        "nvmlDeviceGetUtilizationRates": use_of,
        "nvmlDeviceGetPowerUsage": lambda device: 251_500,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    gpus = NvidiaGpus({"CUDA_VISIBLE_DEVICES": "1,0"})
    assert gpus.read() == [
        GpuReading(1, "a slice", 81920.0, 3.0, None, 251.5),
        GpuReading(0, "a card", 81920.0, 3.0, 83.0, 251.5),
    ]
    gpus.close()


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    gpus = NvidiaGpus({"CUDA_VISIBLE_DEVICES": ""})
    assert gpus.read() == []
    gpus.close()
