"""A reload in host memory packs experts as the first load did, and the engine has its kernels again afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mobula.actors.samplers.vllm.weights import _experts_packed_again


def model() -> nn.Module:
    found = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    found[0].quant_method = SimpleNamespace(moe_kernel="kernel")
    found[1].quant_method = SimpleNamespace()
    return found


@pytest.mark.parametrize(("device", "inside"), [("cpu", None), ("cuda", "kernel")])
def test_kernels_are_made_again_in_host_memory_alone(device: str, inside: str | None) -> None:
    experts = model()
    with _experts_packed_again(experts, torch.device(device)):
        assert experts[0].quant_method.moe_kernel == inside
        experts[0].quant_method.moe_kernel = "another"
    assert experts[0].quant_method.moe_kernel == ("kernel" if device == "cpu" else "another")


def test_a_reload_that_fails_leaves_the_kernel() -> None:
    experts = model()
    with pytest.raises(RuntimeError), _experts_packed_again(experts, torch.device("cpu")):
        raise RuntimeError
    assert experts[0].quant_method.moe_kernel == "kernel"
