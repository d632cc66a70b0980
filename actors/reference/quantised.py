"""Quantises the weights of a frozen policy to 8 or 4 bits with torchao."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

Quantisation = Literal["none", "int8", "int4"]

GROUP = {"int8": 1, "int4": 128}  # values of a row per scale; 1: the whole row


def quantise(model: PreTrainedModel, kind: Quantisation) -> None:
    """Quantises all linear layers except the output layer, in place; embeddings, norms and convolutions are unchanged.
    `int4` skips layers whose row length is no multiple of 128, and needs bfloat16 on an NVIDIA GPU.

    Raises:
        ValueError: torchao is not installed.
    """
    if kind == "none":
        return
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reference.scorers.quantisation={kind} needs {error.name!r}, which is not installed: "
            "pip install 'mobula[quantised]', or set reference.scorers.quantisation=none"
        ) from error
    group, output = GROUP[kind], model.get_output_embeddings()

    def is_chosen(module: nn.Module, _: str) -> bool:
        return isinstance(module, nn.Linear) and module is not output and module.in_features % group == 0

    if kind == "int8":
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_chosen)
    else:
        packing = "tile_packed_to_4d"  # the layout of torch's own kernels
        quantize_(model, Int4WeightOnlyConfig(group_size=group, int4_packing_format=packing), filter_fn=is_chosen)


def num_weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters in memory, each counted once."""
    return sum(_num_bytes(parameter.data) for parameter in model.parameters())


def _num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, or of the parts of a quantised tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_num_bytes(getattr(tensor, name)) for name in names)
