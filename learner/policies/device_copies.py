"""Copies of arrays on a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on the host it shares the array's memory.

    A copy to a GPU leaves from pinned memory, so the host does not wait for the work that the GPU still has to do.
    torch keeps the pinned memory until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
