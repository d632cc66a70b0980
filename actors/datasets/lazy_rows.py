"""Rows that are read when they are needed, in an order that is a pure function of seed, epoch and position."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, Protocol, overload, runtime_checkable

import numpy as np

from mobula.actors.datasets.rows import R, R_co

EpochOrder = Callable[[int, int], np.ndarray]
"""(seed, epoch) -> int64 [num_rows]: a permutation of the rows' places."""


class EndlessRows(Protocol[R_co]):
    """Rows one after the other without end, each of which can be asked by its index."""

    def __len__(self) -> int:
        """Rows of one epoch."""
        ...

    def row(self, index: int) -> R_co:
        """Raises: RowError: the record there cannot be used."""
        ...


@runtime_checkable
class Reorderable(Protocol[R_co]):
    """Rows with an order of their own."""

    def endless(self, seed: int) -> EndlessRows[R_co]: ...


def endless(rows: Sequence[R], seed: int) -> EndlessRows[R]:
    """The rows without end; those that have no order of their own are permuted in every epoch."""
    if isinstance(rows, Reorderable):
        return rows.endless(seed)
    return Shuffled(rows, lambda seed, epoch: epoch_order(len(rows), seed, epoch), seed)


class Shuffled(Generic[R]):
    """Epoch after epoch of `rows`, each in an order of its own."""

    def __init__(self, rows: Sequence[R], order: EpochOrder, seed: int) -> None:
        self._rows = rows
        self._order = lru_cache(maxsize=2)(lambda epoch: order(seed, epoch))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> R:
        epoch, position = divmod(index, len(self._rows))
        return self._rows[int(self._order(epoch)[position])]


def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [num_rows]: the order of one epoch, a pure function of its arguments."""
    return np.random.default_rng([seed % 2**32, epoch]).permutation(num_rows)


def windowed_order(blocks: np.ndarray, window_bytes: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [num_rows]: the order of one epoch in which few blocks are read at a time.

    `blocks` is int64 [num_blocks, 2]: rows of each block, and its bytes in memory. Blocks are taken in random order and
    put together to windows of at most `window_bytes` (or of one block); the rows of a window are shuffled. Blocks that
    fit into one window are shuffled as `epoch_order` does.
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
    """Rows in the order of the files; a record that cannot be used raises a RowError where it is asked."""

    @abstractmethod
    def row_at(self, place: int) -> R:
        """Raises: RowError: the record there cannot be used."""

    @abstractmethod
    def name(self, place: int) -> str:
        """The file and the place in it."""

    @abstractmethod
    def chosen(self, places: np.ndarray, difficulty: np.ndarray | None = None) -> LazyRows[R]:
        """Some of the rows: `places` int64 [N], sorted, with their `difficulty` float64 [N] for a curriculum."""

    @abstractmethod
    def endless(self, seed: int) -> EndlessRows[R]:
        """The rows without end, in the order that a run asks them."""

    @overload
    def __getitem__(self, place: int) -> R: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[R]: ...
    def __getitem__(self, place: int | slice) -> R | Sequence[R]:
        if isinstance(place, slice):
            return [self.row_at(i) for i in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self.row_at(place)
