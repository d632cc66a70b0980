"""The memory that autograd keeps of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def kept_bytes(forward: Callable[[], object], parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of all storages that autograd keeps of `forward`, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    assert result is not None
    return sum(storage.nbytes() for storage in kept.values())
