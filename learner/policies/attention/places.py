"""Layout of packed rows: rows behind one another without padding, each prefix that rows share once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mobula.learner.policies.device_copies import on_device

MIN_SHARE = 16  # a prefix of less than a 16th of its row saves less than it costs


@dataclass(frozen=True)
class RowKeys:
    """Keys and values of packed rows whose first tokens may lie in other rows."""

    index: Tensor  # int64 [K]: packed token of each key, row by row
    ends: Tensor  # int32 [R + 1]: 0 and the cumulative lengths of the R whole rows
    longest: int
    lengths: tuple[int, ...]  # R

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], device: torch.device) -> RowKeys:
        """`rows`: packed tokens of each row, int64."""
        lengths = tuple(map(len, rows))
        return cls(on_device(np.concatenate(rows), device), ends_of(lengths, device), max(lengths), lengths)

    def with_row(self, start: int, num_tokens: int) -> RowKeys:
        """The same and one more row of packed tokens that follow on `start`."""
        own = torch.arange(start, start + num_tokens, device=self.index.device)
        ends = pad(self.ends, (0, 1), value=sum(self.lengths) + num_tokens)
        return RowKeys(torch.cat([self.index, own]), ends, max(self.longest, num_tokens), (*self.lengths, num_tokens))


@dataclass(frozen=True)
class SharedPrefix:
    """The first tokens of a row that another row of the batch has too."""

    source: int  # the other row
    num_tokens: int


@dataclass(frozen=True)
class RowPlaces:
    """The positions of B padded rows after packing without padding.

    A row's own tokens are those behind its shared prefix. Rows are packed in order; R of them have own tokens.
    """

    lengths: tuple[int, ...]  # R: own tokens
    ends: Tensor  # int32 [R + 1]: 0 and the cumulative lengths
    index: Tensor  # int64 [num_tokens]: index of each packed token among the B * S padded tokens
    keys: RowKeys | None  # of the R rows, if some share a prefix
    targets: Tensor  # int64 [N]: packed token before each target
    host_targets: np.ndarray  # the same, on the host

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        width: int,
        targets: tuple[np.ndarray, np.ndarray],
        prefixes: Mapping[int, SharedPrefix],
        device: torch.device,
    ) -> RowPlaces:
        """Args:
        lengths: tokens of each row.
        width: of a padded row (S).
        targets: row and column of the token before each target.
        prefixes: row -> its prefix, each row behind its source.
        """
        num_shared = np.array([prefixes[row].num_tokens if row in prefixes else 0 for row in range(len(lengths))])
        num_own = np.array(lengths) - num_shared
        ends = num_own.cumsum()
        rows = [np.arange(end - num, end) for num, end in zip(num_own, ends, strict=True)]  # packed tokens of each
        for row, prefix in prefixes.items():
            rows[row] = np.append(rows[prefix.source][: prefix.num_tokens], rows[row])
        columns = np.arange(width)
        is_packed = (columns >= num_shared[:, None]) & (columns < np.array(lengths)[:, None])
        placed = np.concatenate(rows)[(np.cumsum(lengths) - lengths)[targets[0]] + targets[1]]
        own_lengths = tuple(num_own[num_own > 0].tolist())
        with_own = [row for row, num in zip(rows, num_own, strict=True) if num > 0]
        return cls(
            lengths=own_lengths,
            ends=ends_of(own_lengths, device),
            index=on_device(np.flatnonzero(is_packed), device),
            keys=RowKeys.of(with_own, device) if prefixes else None,
            targets=on_device(placed, device),
            host_targets=placed,
        )


def ends_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32: 0 and the cumulative lengths."""
    return on_device(np.cumsum([0, *lengths]).astype(np.int32), device)


def shared_prefixes(rows: Sequence[np.ndarray], spans: Sequence[Sequence[tuple[int, int]]]) -> dict[int, SharedPrefix]:
    """Returns row -> the longest prefix that a row before it in the order of their ids has too, in this order.

    Args:
        rows: int64 ids of each row; tokens of different media have different ids.
        spans: start and end of each medium of a row. No prefix ends within a medium.
    """
    # In lexicographic order no earlier row shares more with a row than its neighbour, whatever the order of bytes is.
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    prefixes = {}
    for source, row in pairwise(order):
        longest = min(len(rows[source]), len(rows[row]))
        differs = rows[source][:longest] != rows[row][:longest]
        num_equal = int(differs.argmax()) if differs.any() else longest
        num_shared = min([num_equal, *(start for start, end in spans[row] if start < num_equal < end)])
        if num_shared * MIN_SHARE >= len(rows[row]):
            prefixes[row] = SharedPrefix(source, num_shared)
    return prefixes
