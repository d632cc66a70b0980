"""Whole tensors from shards, many in one exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

BUCKET_BYTES = 64 << 20  # of whole tensors in one exchange; bounds the memory that gathering takes


def gather_whole(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `state`, in order, each one whole. Collective: every rank must run it to the end."""
    bucket: dict[str, Tensor] = {}
    num_bytes, dtype = 0, None
    for name, tensor in state.items():
        num_bytes += tensor.nbytes
        if bucket and (num_bytes > BUCKET_BYTES or tensor.dtype != dtype):
            yield from _gather_bucket(bucket)
            bucket, num_bytes = {}, tensor.nbytes
        bucket[name], dtype = tensor, tensor.dtype
    yield from _gather_bucket(bucket)


def _gather_bucket(bucket: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    sharded = [t for t in bucket.values() if isinstance(t, DTensor)]
    whole = iter(_gather(sharded) if sharded else ())
    for name, tensor in bucket.items():
        yield name, next(whole) if isinstance(tensor, DTensor) else tensor


def _gather(tensors: list[DTensor]) -> list[Tensor]:
    """One all-gather of all local shards (of one rank: none), within the replica. Its first rank holds the largest of
    each tensor, so its sum is the widest.
    """
    assert all(t.placements[-1] == Shard(0) for t in tensors), "FSDP2 shards the first dimension"
    group = tensors[0].device_mesh.get_group(-1)
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return [t.to_local() for t in tensors]
    shapes = [[_local_shape(t, rank, num_ranks) for t in tensors] for rank in range(num_ranks)]
    width = sum(shape.numel() for shape in shapes[0])
    # One collective for many tensors: small ones cost their latency, not their bytes.
    flat = torch.cat([t.to_local().reshape(-1) for t in tensors])
    gathered = flat.new_empty(num_ranks * width)
    dist.all_gather_single(gathered, torch.nn.functional.pad(flat, (0, width - flat.numel())), group)
    if len(tensors) == 1:  # its rows lie in order already, and it may be larger than a bucket: no copy
        return [gathered[: tensors[0].numel()].view(tensors[0].shape)]
    parts = [_split(gathered[rank * width :], shapes[rank]) for rank in range(num_ranks)]
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def _local_shape(tensor: DTensor, rank: int, num_ranks: int) -> torch.Size:
    """The shape of a rank's shard: rows come in chunks of ceil(rows / ranks), the last ones shorter or empty."""
    rows = tensor.shape[0]
    chunk = -(-rows // num_ranks)
    return torch.Size((min(max(rows - rank * chunk, 0), chunk), *tensor.shape[1:]))


def _split(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]
