"""Sequence parallelism: ranks share the tokens of the same rows and exchange heads around attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


class SequenceRanks:
    """N neighbouring ranks with the same rows. Each rank computes an N-th of the tokens.

    Attention needs all tokens of a row: before it an all-to-all gives each rank all tokens of a share of the heads, and
    after it a second one restores the tokens. The rest of a decoder computes each token separately. The outputs for
    targets are gathered, so each rank computes the loss of whole rows. Gradients are summed over all ranks: an output
    passes its gradient only to the rank that computed it. Each rank encodes a share of the rows' images and gathers the
    features of all images; gradients of features return to the rank that encoded them.

    Source: DeepSpeed Ulysses, arXiv:2309.14509.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Forms groups of `size` ranks (`learner.sequence_parallel`). Collective over all ranks."""
        mesh = init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
        self.size = size
        self._group = mesh.get_group("sequence")
        self.rank = mesh.get_local_rank("sequence")

    def chunk(self, num_tokens: int) -> slice:
        """Returns this rank's tokens; the last tokens of the group may lie beyond `num_tokens`."""
        length = self._length(num_tokens)
        return slice(self.rank * length, (self.rank + 1) * length)

    def num_padded(self, num_tokens: int) -> int:
        """Returns the number of tokens of all ranks, padding included."""
        return self._length(num_tokens) * self.size

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """[1, heads, n, D] of this rank's n tokens -> [1, heads / N, N * n, D] of this rank's heads. Key and value
        heads are repeated if N does not divide their number."""
        exchanged = []
        for part in parts:
            part = part[0].repeat_interleave(self.size // gcd(part.shape[1], self.size), dim=0)  # [heads, n, D]
            sent = part.unflatten(0, (self.size, -1))
            exchanged.append(_AllToAll.apply(sent, self._group).transpose(0, 1).flatten(1, 2).unsqueeze(0))
        return tuple(exchanged)

    def to_tokens(self, output: Tensor) -> Tensor:
        """[1, N * n, heads / N, D] of this rank's heads -> [1, n, heads, D] of this rank's tokens."""
        sent = output[0].unflatten(0, (self.size, -1))
        return _AllToAll.apply(sent, self._group).transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def owned(self, places: np.ndarray, num_tokens: int) -> tuple[np.ndarray, list[int]]:
        """Assigns targets to the ranks that compute the tokens at `places` [N].

        Returns int64 [N], the targets of each rank in order, rank by rank, and for each rank the end of its targets.
        """
        owners = places // self._length(num_tokens)
        return owners.argsort(kind="stable"), np.bincount(owners, minlength=self.size).cumsum().tolist()

    def own(self, ends: list[int]) -> slice:
        """Returns the range of this rank in `ends`."""
        return slice(ends[self.rank - 1] if self.rank > 0 else 0, ends[self.rank])

    def gathered(self, values: Tensor, ends: list[int]) -> Tensor:
        """Gathers [n] of each rank, with sizes by `ends`, to [N] of all ranks, rank by rank."""
        return _Gather.apply(values, ends, self.own(ends), self._group)

    def dealt(self, costs: Sequence[int]) -> list[list[int]]:
        """Assigns items to ranks at nearly equal cost (longest processing time first)."""
        shares: list[list[int]] = [[] for _ in range(self.size)]
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            min(shares, key=lambda share: sum(costs[j] for j in share)).append(i)
        return shares

    def features(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Gathers [n, H] of each rank, with n by `counts`, to [N, H], rank by rank."""
        return _GatherFeatures.apply(own, counts, self.rank, self._group)

    def _length(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)


class _AllToAll(torch.autograd.Function):
    """Sends part j of axis 0 to rank j; part i of the result comes from rank i. The same holds for gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


class _Gather(torch.autograd.Function):
    """Concatenates the values of all ranks; each rank keeps the gradient of its own values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ends: list[int], own: slice, group: dist.ProcessGroup) -> Tensor:
        ctx.own = own
        return _all_gathered(values, np.diff(ends, prepend=0).tolist(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient[ctx.own], None, None, None


class _GatherFeatures(torch.autograd.Function):
    """Concatenates the values of all ranks; each rank gets the gradients of its values, summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: Sequence[int], rank: int, group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.rank, ctx.group = counts, rank, group
        return _all_gathered(values, counts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        parts = [_filled(part, max(ctx.counts)) for part in gradient.split(list(ctx.counts))]
        received = _exchanged(torch.stack(parts), ctx.group)  # [ranks, longest, H]
        return received.sum(0)[: ctx.counts[ctx.rank]], None, None, None


def _all_gathered(values: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Concatenates `values` of all ranks; rank i has `counts[i]`."""
    longest = max(counts)
    received = values.new_empty(len(counts) * longest, *values.shape[1:])
    dist.all_gather_single(received, _filled(values, longest), group)
    return torch.cat([part[:count] for part, count in zip(received.split(longest), counts, strict=True)])


def _filled(values: Tensor, length: int) -> Tensor:
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])
