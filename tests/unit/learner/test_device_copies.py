"""Arrays on the host are shared with their tensors, not copied."""

from __future__ import annotations

import numpy as np
import torch

from mobula.learner.policies.device_copies import on_device


def test_on_the_host_a_tensor_shares_the_memory_of_its_array() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    tensor = on_device(array, torch.device("cpu"))
    array[0, 0] = 9
    assert tensor[0, 0] == 9 and tensor.dtype is torch.int64 and tensor.shape == (2, 3)
