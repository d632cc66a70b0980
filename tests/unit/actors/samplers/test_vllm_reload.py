"""A model that gave its weights up for packed copies loads them again; what does not come is named."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from actors.samplers.vllm.patches.reload import can_load_again, load_again
from cluster.errors import WeightSyncError

CONFIG = SimpleNamespace(quantization=None, dtype=torch.float32)


class Packing(QuantizeMethodBase):
    """Keeps a layer's weight as a packed copy alone."""

    def create_weights(self, layer: nn.Module, *args: object, **kwargs: object) -> None: ...

    def apply(self, layer: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        return layer.packed

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.packed = layer.weight.detach().clone()
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Model(nn.Module):
    """Two layers that pack, and a norm that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2, bias=False) for _ in range(2)])
        self.norm = nn.LayerNorm(2, bias=False)
        record_metadata_for_reloading(self)
        for layer in self.layers:
            layer.quant_method = Packing()
            layer.quant_method.process_weights_after_loading(layer)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in tensors:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


def whole(value: float) -> dict[str, torch.Tensor]:
    return {
        "layers.0.weight": torch.full((2, 3), value),
        "layers.1.weight": torch.full((2, 3), value + 1),
        "norm.weight": torch.full((2,), value + 2),
    }


def test_whole_models_one_after_the_other() -> None:
    model = Model()
    for value in (10.0, 20.0):
        load_again(model, CONFIG, whole(value).items())
        assert [layer.packed.unique().tolist() for layer in model.layers] == [[value], [value + 1]]
        assert model.norm.weight.tolist() == [value + 2] * 2
        assert [layer.weight.numel() for layer in model.layers] == [0, 0]


def test_what_did_not_come_is_named_and_may_come_later() -> None:
    model = Model()
    part = {name: tensor for name, tensor in whole(10.0).items() if name != "layers.1.weight"}
    with pytest.raises(WeightSyncError, match=r"not layers\.1\.weight"):
        load_again(model, CONFIG, part.items())
    load_again(model, CONFIG, whole(20.0).items())
    assert [layer.packed.unique().tolist() for layer in model.layers] == [[20.0], [21.0]]


def test_only_plain_weights_in_host_memory() -> None:
    assert can_load_again(CONFIG, torch.device("cpu"))
    assert not can_load_again(CONFIG, torch.device("cuda"))
    assert not can_load_again(SimpleNamespace(quantization="fp8"), torch.device("cpu"))


class Experts(Packing):
    """As vLLM's: the kernel packs, and is asked to where it is made."""

    moe_kernel: SimpleNamespace | None = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.moe_kernel is None:
            self.moe_kernel = SimpleNamespace(fused_experts=Packing())
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def test_experts_are_packed_by_their_kernel_after_every_push() -> None:
    model = Model()
    layer = model.layers[0]
    layer.quant_method = Experts()
    for value in (10.0, 20.0):
        load_again(model, CONFIG, whole(value).items())
        assert layer.packed.unique().tolist() == [value]
        assert layer.weight.numel() == 0
