"""Digests of tensors, and pushes of changed elements alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.manifest import DTYPE_BYTES, Bucket, TensorSpec, align

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
    num_rows, weights = words.numel() // NUM_COLUMNS, _column_weights(data.device)
    rest = words[num_rows * NUM_COLUMNS :]
    total = (rest * weights[: rest.numel()]).sum()
    # Most tensors of a small model have less than a row and no tail: each operation costs more than their bytes.
    if num_rows > 0:
        rows = words[: num_rows * NUM_COLUMNS].view(num_rows, NUM_COLUMNS)
        in_blocks = num_rows // BLOCK_ROWS * BLOCK_ROWS
        blocks = rows[:in_blocks].view(-1, BLOCK_ROWS, NUM_COLUMNS)
        columns = blocks.sum(dim=1).sum(dim=0) + rows[in_blocks:].sum(dim=0)  # [NUM_COLUMNS]
        total += (columns * weights[:-1]).sum()
    if tail.numel() > 0:
        shifts = 8 * torch.arange(tail.numel(), device=data.device)
        total += (tail.to(torch.int64) << shifts).sum() * weights[-1]
    return total


@cache
def _column_weights(device: torch.device) -> torch.Tensor:
    """int64 [NUM_COLUMNS + 1]: the weight of each column, and of the bytes after the last word."""
    return (torch.arange(1, NUM_COLUMNS + 2, device=device) * GOLDEN) | 1


def weights_checksum(digests: Iterable[tuple[TensorSpec, int]]) -> int:
    """Checksum of whole tensors by name, shape, dtype and `digest`: the same in any order, buckets and payload.

    The sum of the checksums of parts is that of the whole, modulo 2**SUM_BITS. It finds errors and exchanged weights;
    `digest` is no cryptographic hash, so weights with a wanted checksum can be constructed.
    """
    texts = (f"{spec.name} {spec.shape} {spec.dtype} {value % 2**64}" for spec, value in digests)
    return sum(int(hashlib.sha256(text.encode()).hexdigest(), 16) for text in texts) % 2**SUM_BITS


# Changes of tensors between two versions: the messages of a push with `weight_sync.payload=delta`.
#
# Tensors are compared as integers of their width, so a changed bit is a change, also of -0.0 and NaN. A message holds
# the changed elements of one tensor and the gaps between their positions, with 8 or 16 bits a gap, or the whole
# tensor where that has fewer bytes. A gap that does not fit is divided by elements that are sent although they did
# not change. An unchanged tensor has no bytes. Every message names the digest of the whole new tensor.

WORDS = {2: torch.int16, 4: torch.int32}  # bytes of an element -> the integers that it is compared as
WHOLE = 0  # bytes of a gap in a message with all elements
GAP_TYPES = {1: torch.uint8, 2: torch.int16}  # bytes of a gap -> as stored; 16 bits wrap around
HEADER = 3  # numbers of a message: elements, bytes of a gap, digest of the new tensor


@dataclass(frozen=True)
class PushedChanges:
    """Contents of a push: bytes to each receiver, elements that differ from the version before (None: whole tensors
    were sent), and the `weights_checksum` of the new version."""

    num_bytes: int
    num_changed: int | None
    checksum: int = 0

    @classmethod
    def total(cls, parts: Sequence[PushedChanges]) -> PushedChanges:
        counts = [part.num_changed for part in parts if part.num_changed is not None]
        checksum = sum(part.checksum for part in parts) % 2**SUM_BITS
        return cls(sum(part.num_bytes for part in parts), sum(counts) if len(counts) == len(parts) else None, checksum)


@dataclass(frozen=True)
class VersionStep:
    """The versions between which a push is sent, for the learner."""

    version: int
    base_version: int | None  # that all receivers hold; None sends whole tensors
    is_last: bool  # `version` is the base of the next push


@dataclass
class Base:
    """Tensors of one version by checkpoint name, of sender or receiver, to which the next changes apply."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    version: int | None = None  # None: unknown, or of no single version

    @contextmanager
    def changing_to(self, version: int) -> Iterator[None]:
        """The body changes the tensors; they have no version if it fails."""
        self.version = None
        yield
        self.version = version

    def check(self, base_version: int | None) -> None:
        """Refuses changes that do not apply to the version held."""
        if base_version not in (None, self.version):
            held = "no whole version" if self.version is None else f"version {self.version}"
            raise WeightSyncError(
                f"the push has the changes since version {base_version}, and this engine has {held}: it needs whole "
                "tensors"
            )


@dataclass(frozen=True)
class TensorChanges:
    """The message for one tensor."""

    header: tuple[int, int, int]  # as HEADER
    data: torch.Tensor  # uint8 [message_bytes(...)]
    num_changed: int


def message(now: torch.Tensor, base: torch.Tensor | None) -> TensorChanges:
    """The message that turns `base` into `now`, flat tensors of one integer type; without `base` of all elements."""
    new_digest = int(digest(now.view(torch.uint8)))
    if base is None:
        return TensorChanges((now.numel(), WHOLE, new_digest), now.view(torch.uint8), now.numel())
    changed = _different(now, base)  # [number of changes]
    num_changed = changed.numel()
    if num_changed == 0:
        return TensorChanges((0, WHOLE, new_digest), now[:0].view(torch.uint8), 0)
    gaps = torch.diff(changed, prepend=changed.new_full((1,), -1)) - 1
    sizes = {}
    for gap_bytes in GAP_TYPES:
        dividers = gaps >> (8 * gap_bytes)
        sizes[gap_bytes] = (num_changed + int(dividers.sum())) * (gap_bytes + now.itemsize)
    gap_bytes = min(sizes, key=sizes.__getitem__)
    if sizes[gap_bytes] >= now.nbytes:
        return TensorChanges((now.numel(), WHOLE, new_digest), now.view(torch.uint8), num_changed)
    codes, positions = _divided(gaps, changed, gap_bytes)
    parts = (now[positions].view(torch.uint8), codes.to(GAP_TYPES[gap_bytes]).view(torch.uint8))
    return TensorChanges((codes.numel(), gap_bytes, new_digest), torch.cat(parts), num_changed)


def _different(now: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """int64 positions of the elements that differ; on a CPU numpy compares in less than half of torch's time."""
    if now.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(now.numpy() != base.numpy()))
    return (now != base).nonzero().view(-1)


def _divided(gaps: torch.Tensor, changed: torch.Tensor, gap_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaps of at most `gap_bytes` and their positions, int64 both: each larger gap is divided."""
    largest = (1 << (8 * gap_bytes)) - 1
    dividers = gaps >> (8 * gap_bytes)
    if not dividers.any():
        return gaps, changed
    index = torch.arange(gaps.numel(), device=gaps.device) + dividers.cumsum(0)  # of each change among all that is sent
    codes = gaps.new_full((int(index[-1]) + 1,), largest)
    codes[index] = gaps & largest
    return codes, (codes + 1).cumsum(0) - 1


def apply(header: Sequence[int], data: torch.Tensor, words: torch.Tensor) -> None:
    """Turns `words` into the sender's, in place; `data` may be on another device."""
    num_sent, gap_bytes, _ = header
    if num_sent == 0:
        return
    data = data.to(words.device)
    values = data[: num_sent * words.itemsize].view(words.dtype)
    if gap_bytes == WHOLE:
        words.copy_(values)
        return
    codes = data[values.nbytes : values.nbytes + num_sent * gap_bytes].view(GAP_TYPES[gap_bytes])
    gaps = codes.to(torch.int64) & ((1 << (8 * gap_bytes)) - 1)
    words.index_copy_(0, (gaps + 1).cumsum(0) - 1, values)


def message_bytes(header: Sequence[int], spec: TensorSpec) -> int:
    num_sent, gap_bytes, _ = header
    return num_sent * (gap_bytes + DTYPE_BYTES[spec.dtype])


def words_of(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The elements of a tensor as flat integers; shares memory with a tensor of the dtype of `spec` without gaps."""
    return tensor.detach().to(getattr(torch, spec.dtype)).contiguous().view(-1).view(WORDS[DTYPE_BYTES[spec.dtype]])


def offsets(bucket: Bucket, headers: Sequence[Sequence[int]]) -> list[int]:
    """Where the message of each tensor of a bucket begins, and where the last one ends."""
    ends = [0]
    for slot, header in zip(bucket.slots, headers, strict=True):
        ends.append(align(ends[-1] + message_bytes(header, slot.spec)))
    return ends


@torch.no_grad()
def apply_bucket(
    bucket: Bucket, headers: Sequence[Sequence[int]], data: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Applies the messages of a bucket to `tensors`, in place; returns the names of those that then differ from the
    sender's."""
    arrived = []
    for slot, header, start in zip(bucket.slots, headers, offsets(bucket, headers), strict=False):
        tensor = tensors[slot.spec.name].detach()
        words = words_of(tensor, slot.spec)
        apply(header, data[start:], words)
        if words.data_ptr() != tensor.data_ptr():
            tensor.copy_(words.view(getattr(torch, slot.spec.dtype)).view(slot.spec.shape))
        arrived.append(digest(words.view(torch.uint8)))
    digests = torch.stack(arrived).tolist()
    return [
        slot.spec.name
        for slot, header, ours in zip(bucket.slots, headers, digests, strict=True)
        if ours != header[HEADER - 1]
    ]
