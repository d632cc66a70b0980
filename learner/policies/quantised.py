"""A frozen base in 4 or 8 bits under adapters (QLoRA, arXiv:2305.14314).

`nf4`: NormalFloat4 of torchao, blocks of 64 values with 8-bit scales, 0.53 bytes a value. `int8`: a float32 scale for
each row, 1 byte a value. A product dequantises its weight in the compute dtype, in the forward and the backward pass.

Engines load the dequantised weights (`trained.write_dequantised`), so engine and learner compute with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Quantisation = Literal["none", "nf4", "int8"]
BLOCK, MOST_BLOCKS = 64, 256  # values with one scale, and scales with one scale
MAX_INT8 = 127


class QuantisedLinear(nn.Linear):
    """A frozen linear layer, which `quantise_layers` makes of an `nn.Linear` on the meta device."""

    kind: Quantisation
    numbers: torch.dtype  # that the dequantised weight is rounded to
    scale: Tensor | None  # of int8, [rows, 1]

    def take(self, weight: Tensor, device: torch.device) -> None:
        """Quantises a weight [out, in] and holds it on `device`."""
        held, self.scale = quantised(weight.to(device, self.numbers), self.kind)
        self.weight = nn.Parameter(held, requires_grad=False)

    @property
    def is_filled(self) -> bool:
        return self.weight.device.type != "meta"

    def dequantised(self) -> Tensor:
        return dequantised(self.weight.data, self.scale).to(self.numbers)

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        product = _Product.apply(inputs, self)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """A state dict has the name and the shape of the weight; `with_dequantised` gives it values."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_filled:
            shape = (self.out_features, self.in_features)
            destination[f"{prefix}weight"] = torch.empty(shape, dtype=self.numbers, device="meta")


class _Product(torch.autograd.Function):
    """x W^T with W dequantised for each pass: only x and the quantised weight are kept in between."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return linear(inputs, layer.dequantised().to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantised().to(grad.dtype), None


def quantised(weight: Tensor, kind: Quantisation) -> tuple[Tensor, Tensor | None]:
    """The quantised weight, and the scale of each row for `int8`."""
    if kind == "int8":
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / MAX_INT8
        return (weight.float() / scale).round().to(torch.int8), scale
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return to_nf4(weight, BLOCK, gcd(weight.numel() // BLOCK, MOST_BLOCKS)), None


def dequantised(held: Tensor, scale: Tensor | None) -> Tensor:
    if scale is not None:
        return held.float() * scale
    whole: Tensor = held.get_original_weight()  # type: ignore[attr-defined]  # of torchao's NF4Tensor
    return whole


def rounded(weight: Tensor, kind: Quantisation, numbers: torch.dtype) -> Tensor:
    """The weight that a learner computes with: quantised from `numbers`, and dequantised."""
    return dequantised(*quantised(weight.to(numbers), kind)).to(numbers)


def takes(shape: tuple[int, ...], kind: Quantisation) -> bool:
    """Whether a weight of this shape can be quantised."""
    return kind == "int8" or shape[0] * shape[1] % BLOCK == 0


def quantise_layers(model: nn.Module, modules: Iterable[str], kind: Quantisation, numbers: torch.dtype) -> None:
    """Makes linear layers of a model on the meta device `QuantisedLinear`, in place."""
    for name in modules:
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear, f"{name} is {type(layer).__name__}"
        layer.__class__ = QuantisedLinear
        assert isinstance(layer, QuantisedLinear)
        layer.kind, layer.numbers = kind, numbers
        layer.register_buffer("scale", None, persistent=False)
        layer.weight.requires_grad_(False)


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    """State-dict name of a weight -> its layer."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, QuantisedLinear)}


def with_dequantised(model: nn.Module, state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A state dict of a model whose quantised weights get their values, one at a time."""
    layers = quantised_layers(model)
    for name, tensor in state:
        yield name, layers[name].dequantised() if name in layers and layers[name].is_filled else tensor
