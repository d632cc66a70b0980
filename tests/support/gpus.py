"""The GPUs of this machine, and the marks of tests that need one."""

from __future__ import annotations

import pytest
import torch

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ON_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU that torch can use"),
)
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs: NCCL refuses two members on one")
