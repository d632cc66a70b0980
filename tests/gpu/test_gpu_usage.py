"""What NVML reports of a GPU that works, as the model benchmark and the lmms-eval wrapper record it."""

from __future__ import annotations

import os
import time

import pytest
import torch

from mobula.cluster.runtime.usage import UsageSampler

HELD_MIB = 1024
WORK_S = 3.0  # a driver averages the utilisation over up to a second

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
]


def test_a_gpu_that_works_is_seen_to() -> None:
    torch.cuda.synchronize()
    with UsageSampler(os.getpid(), period_s=0.1) as usage:
        held = torch.ones(HELD_MIB << 18, device="cuda")  # of 4 bytes
        matrix = torch.ones(4096, 4096, device="cuda")
        until = time.monotonic() + WORK_S
        while time.monotonic() < until:
            (matrix @ matrix).sum().item()
        assert held.numel()
    used = [gpu for gpu in usage.summary()["gpus"] if gpu["name"] == torch.cuda.get_device_name()]
    assert used, "the GPU that torch computes on is not among those that were watched"
    assert max(gpu["memory_used_mib"]["max"] for gpu in used) >= HELD_MIB
    assert all(gpu["memory_used_mib"]["max"] <= gpu["memory_total_mib"] for gpu in used)
    sampled = [gpu["utilization_percent"] for gpu in used if gpu["utilization_percent"] is not None]
    assert all(percent["max"] <= 100 for percent in sampled)
    assert not sampled or max(percent["max"] for percent in sampled) > 50
