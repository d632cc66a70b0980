"""Digests of the bytes of a push: exact in any dtype, computed where the bytes are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mobula.cluster.weight_sync.manifest import TensorSpec

WORD_BYTES = 8
NUM_COLUMNS = 1021  # prime, so that the rows of a matrix do not line up with it
BLOCK_ROWS = 32  # that are added up at once: as many as a CPU's cache holds
SUM_BITS = 128  # of a checksum of weights
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd; its multiples are spread over all 64 bits (Knuth, TAOCP 6.4)


def digest(data: torch.Tensor) -> torch.Tensor:
    """int64 [] of `data`, uint8 [N] without gaps, on the device of `data`.

    Words of 8 bytes are added up in columns, and the sums are weighted by odd numbers, all modulo 2**64. A change of
    one word always changes the digest. Changes of several words keep it with a probability of about 2**-64, unless they
    cancel within a column. One pass over the memory: a cryptographic hash costs more than the push itself.
    """
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    end = data.numel() // WORD_BYTES * WORD_BYTES
    words, tail = data[:end].reshape(-1, WORD_BYTES).view(torch.int64).flatten(), data[end:]
    num_rows = words.numel() // NUM_COLUMNS
    rows, rest = words[: num_rows * NUM_COLUMNS].view(num_rows, NUM_COLUMNS), words[num_rows * NUM_COLUMNS :]
    in_blocks = num_rows // BLOCK_ROWS * BLOCK_ROWS
    blocks = rows[:in_blocks].view(-1, BLOCK_ROWS, NUM_COLUMNS)
    columns = blocks.sum(dim=1).sum(dim=0) + rows[in_blocks:].sum(dim=0)  # [NUM_COLUMNS]
    columns[: rest.numel()] += rest
    weights = (torch.arange(1, NUM_COLUMNS + 2, device=data.device) * GOLDEN) | 1  # [NUM_COLUMNS + 1]
    shifts = 8 * torch.arange(tail.numel(), device=data.device)
    last = (tail.to(torch.int64) << shifts).sum()
    return (columns * weights[:-1]).sum() + last * weights[-1]


def weights_checksum(digests: Iterable[tuple[TensorSpec, int]]) -> int:
    """Checksum of whole tensors by name, shape, dtype and `digest`: the same in any order, buckets and payload.

    The sum of the checksums of parts is that of the whole, modulo 2**SUM_BITS. It finds errors and exchanged weights;
    `digest` is no cryptographic hash, so weights with a wanted checksum can be constructed.
    """
    texts = (f"{spec.name} {spec.shape} {spec.dtype} {value % 2**64}" for spec, value in digests)
    return sum(int(hashlib.sha256(text.encode()).hexdigest(), 16) for text in texts) % 2**SUM_BITS
