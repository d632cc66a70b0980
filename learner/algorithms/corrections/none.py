"""No correction."""

from __future__ import annotations

import torch
from torch import Tensor


def none(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """w = 1."""
    return torch.ones_like(behavior_logprobs)
