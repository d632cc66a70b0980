"""Accumulates metrics over micro-batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Meter:
    """Sums scalars by name, or keeps their maximum. Does not synchronise with the device before `reduce`.

    Every rank must report the same names in the same order.
    """

    def __init__(self, num_copies: int = 1) -> None:
        """`num_copies` ranks report the same numbers (`learner.sequence_parallel`), which count once."""
        self._num_copies = num_copies
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_shared(self, **values: Tensor) -> None:
        """Adds values that all ranks report identically, once."""
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.add(**{name: value * self._num_copies / num_ranks for name, value in values.items()})

    def keep_max(self, **values: Tensor) -> None:
        for name, value in values.items():
            value = value.detach()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def reduce(self) -> dict[str, float]:
        """Totals and maxima over all ranks. Collective."""
        sums = _reduced(self._sums, dist.ReduceOp.SUM)
        return {name: value / self._num_copies for name, value in sums.items()} | _reduced(
            self._maxima, dist.ReduceOp.MAX
        )


def _reduced(values: dict[str, Tensor], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
    if not values:
        return {}
    stacked = torch.stack([value.float() for value in values.values()])
    if dist.is_initialized():
        dist.all_reduce(stacked, operation)
    return dict(zip(values, stacked.tolist(), strict=True))
