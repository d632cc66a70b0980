"""Rows that are read on demand, in an order that is a pure function of seed, epoch and position."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, Protocol, overload, runtime_checkable

import numpy as np

from mobula.actors.datasets.rows import R, R_co

EpochOrder = Callable[[int, int], np.ndarray]
"""(seed, epoch) -> int64 [num_rows]: a permutation of the row indices."""


class EndlessRows(Protocol[R_co]):
    """An endless sequence of rows with random access."""

    def __len__(self) -> int:
        """Rows of one epoch."""
        ...

    def row(self, index: int) -> R_co:
        """Raises: RowError: the record is unusable."""
        ...


@runtime_checkable
class Reorderable(Protocol[R_co]):
    """Rows that define an order."""

    def endless(self, seed: int) -> EndlessRows[R_co]: ...


def endless(rows: Sequence[R], seed: int) -> EndlessRows[R]:
    """Repeats the rows endlessly, in the order that they define, or permuted in every epoch."""
    if isinstance(rows, Reorderable):
        return rows.endless(seed)
    return Shuffled(rows, lambda seed, epoch: epoch_order(len(rows), seed, epoch), seed)


class Shuffled(Generic[R]):
    """Repeats `rows` endlessly, with another order in each epoch."""

    def __init__(self, rows: Sequence[R], order: EpochOrder, seed: int) -> None:
        self._rows = rows
        self._order = lru_cache(maxsize=2)(lambda epoch: order(seed, epoch))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> R:
        epoch, position = divmod(index, len(self._rows))
        return self._rows[int(self._order(epoch)[position])]


def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Returns int64 [num_rows]: the order of one epoch, a pure function of the arguments."""
    return np.random.default_rng([seed % 2**32, epoch]).permutation(num_rows)


def windowed_order(blocks: np.ndarray, window_bytes: int, seed: int, epoch: int) -> np.ndarray:
    """Returns int64 [num_rows]: an order of one epoch that needs few blocks in memory.

    Blocks are grouped in random order into windows of at most `window_bytes` (at least one block), and the rows of a
    window are shuffled. If all blocks fit into one window, the order is `epoch_order`.

    Args:
        blocks: int64 [num_blocks, 2]: number of rows and bytes in memory of each block.
    """
    num_rows = int(blocks[:, 0].sum())
    if blocks[:, 1].sum() <= window_bytes:
        return epoch_order(num_rows, seed, epoch)
    rng = np.random.default_rng([seed % 2**32, epoch])
    starts = np.cumsum(blocks[:, 0]) - blocks[:, 0]
    order: list[np.ndarray] = []
    window: list[np.ndarray] = []
    held = 0
    for block in rng.permutation(len(blocks)):
        rows, num_bytes = blocks[block]
        if window and held + num_bytes > window_bytes:
            order.append(rng.permutation(np.concatenate(window)))
            window, held = [], 0
        window.append(np.arange(starts[block], starts[block] + rows))
        held += int(num_bytes)
    order.append(rng.permutation(np.concatenate(window)))
    return np.concatenate(order)


class LazyRows(Sequence[R]):
    """Rows in the order of the files. Access to an unusable record raises a RowError."""

    @abstractmethod
    def row_at(self, index: int) -> R:
        """Raises: RowError: the record is unusable."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The file, and the position in the file."""

    @abstractmethod
    def chosen(self, indices: np.ndarray, difficulty: np.ndarray | None = None) -> LazyRows[R]:
        """Selects rows by sorted `indices`, int64 [N]; `difficulty`, float64 [N], is for a curriculum."""

    @abstractmethod
    def endless(self, seed: int) -> EndlessRows[R]:
        """Repeats the rows endlessly, in training order."""

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[R]: ...
    def __getitem__(self, index: int | slice) -> R | Sequence[R]:
        if isinstance(index, slice):
            return [self.row_at(i) for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.row_at(index)
