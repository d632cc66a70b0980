"""Weights of a frozen policy in 8 or 4 bits, by torchao's weight-only quantisation."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

Quantisation = Literal["none", "int8", "int4"]

GROUP = {"int8": 1, "int4": 128}  # values along a row that share a scale; 1: the whole row does


def quantise(model: PreTrainedModel, kind: Quantisation) -> None:
    """Quantise the weights of all linear layers but the output layer, in place; embeddings, norms and convolutions stay
    as they are. `int4` leaves a layer whose rows are no multiple of 128 as it is, and needs bfloat16 on an NVIDIA GPU.

    Raises:
        ValueError: torchao is not installed.
    """
    if kind == "none":
        return
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reference.quantisation={kind} needs {error.name!r}, which is not installed: "
            "pip install 'mobula[quantised]', or set reference.quantisation=none"
        ) from error
    group, output = GROUP[kind], model.get_output_embeddings()

    def is_chosen(module: nn.Module, _: str) -> bool:
        return isinstance(module, nn.Linear) and module is not output and module.in_features % group == 0

    if kind == "int8":
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_chosen)
    else:
        packing = "tile_packed_to_4d"  # of the kernels that torch itself has
        quantize_(model, Int4WeightOnlyConfig(group_size=group, int4_packing_format=packing), filter_fn=is_chosen)


def num_weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters as they lie in memory, each once."""
    return sum(_num_bytes(parameter.data) for parameter in model.parameters())


def _num_bytes(tensor: Tensor) -> int:
    """Of a tensor, or of the tensors that a quantised one is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_num_bytes(getattr(tensor, name)) for name in names)
