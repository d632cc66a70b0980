"""Readings of processes and GPUs: a busy child counts, a dead one does not; GPUs are those that the process sees."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from mobula.cluster.runtime.usage import GpuReading, NvidiaGpus, ProcessTree, visible

BUSY = "import sys\nblock = bytearray(64 << 20)\nprint('on', flush=True)\nwhile True:\n    pass"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"
UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


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
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    gpus = NvidiaGpus({"CUDA_VISIBLE_DEVICES": "1,0"})
    assert gpus.read() == [
        GpuReading("a slice", 81920.0, 3.0, None),
        GpuReading("a card", 81920.0, 3.0, 83.0),
    ]
    gpus.close()


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    gpus = NvidiaGpus({"CUDA_VISIBLE_DEVICES": ""})
    assert gpus.read() == []
    gpus.close()
