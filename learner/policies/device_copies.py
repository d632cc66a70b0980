"""Copies of arrays on a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array as a tensor on `device`; on the CPU it shares the array's memory.

    Copies to a GPU are asynchronous, from pinned memory, so that the host does not wait for queued work of the GPU.
    torch keeps the pinned memory until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
