"""Runs inside vLLM's worker process: a push of all weights to an engine in host memory loads as the first load did.

vLLM's layer-wise reload gives every layer new tensors, counts what is written into them and copies the result to where
the kernels (and graphs that were captured of them) expect it. In host memory nothing was captured; there the layers
only hold their weights packed. So they get room for plain weights again, the model loads them, and they are packed once
more, by vLLM's own functions throughout. It takes half the time where layers are small, and the room of all plain
weights for as long as it lasts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from cluster.errors import WeightSyncError

WRAPPED = "online_process_loader"  # what vLLM calls them


def can_load_again(model_config: ModelConfig, device: torch.device) -> bool:
    """Whether the weights of the first load can be loaded over: not where a quantised layer made others of them."""
    return device.type == "cpu" and model_config.quantization is None


def load_again(model: torch.nn.Module, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all weights, in checkpoint format, into a model that has packed those it had.

    Raises:
        WeightSyncError: something that has to be loaded did not come; the model is unusable until it does.
    """
    rooms = _make_room(model)
    loaded = model.load_weights(tensors)
    if missing := rooms - loaded:
        raise WeightSyncError(f"the engine loaded everything that came but not {', '.join(sorted(missing))}")
    _pack(model, model_config)


def _make_room(model: torch.nn.Module) -> set[str]:
    """Give each layer an empty tensor in place of every one that it gave up for a packed copy; returns their names."""
    rooms = set()
    for path, layer in model.named_modules():
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            _unwrap_loader(tensor)
        described, _ = get_layerwise_info(layer).restore_metadata
        for name, meta in described.items():
            if getattr(layer, name).shape != meta.shape:
                room = materialize_meta_tensor(restore_layer_refs(meta, layer))
                _unwrap_loader(room)
                setattr(layer, name, room)
                rooms.add(f"{path}.{name}")
    return rooms


def _unwrap_loader(tensor: torch.Tensor) -> None:
    """A layer-wise reload leaves loaders of its own behind where it loaded nothing: outside of one they do nothing."""
    if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == WRAPPED:
        tensor.weight_loader = _get_original_loader(tensor)


def _pack(model: torch.nn.Module, model_config: ModelConfig) -> None:
    """Have every layer pack the weights that were loaded into it; attention comes last, as in a first load.

    Experts are packed by their kernel, which vLLM asks for that where it makes the kernel, and never again.
    """
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), QuantizeMethodBase):
            kernel = getattr(method, "moe_kernel", None)
            method.process_weights_after_loading(layer)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(model_config.dtype)
