"""What this machine has, as a run counts it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mobula.cluster.runtime import usage
from mobula.deploy.host import machine


class FourGpus:
    """The part of NVML that is asked; the driver shows no /proc, as in WSL2."""

    NVMLError_LibraryNotFound = NVMLError_DriverNotLoaded = NVMLError_NotSupported = OSError

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}a2b"

    def nvmlDeviceGetName(self, device: int) -> str:
        return "NVIDIA L4"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(total=(24 - device) << 30, used=0)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"


@pytest.mark.parametrize(
    ("visible", "num", "smallest"),
    [(None, 4, 21), ("2,3", 2, 21), ("GPU-1a2b", 1, 23), ("", 0, None), ("-1", 0, None)],
)
def test_gpus_are_those_that_the_command_may_see(
    visible: str | None, num: int, smallest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "pynvml", FourGpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.this_machine()
    assert found.num_gpus == num
    assert found.gpu_memory_bytes == (None if smallest is None else smallest << 30)
    assert usage.driver_version() == "580.65.06"
