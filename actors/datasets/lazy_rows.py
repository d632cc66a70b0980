"""LazyRows: a sequence of rows that are read when they are asked, so that a dataset need not fit into memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

import numpy as np

from mobula.actors.datasets.order import EndlessRows
from mobula.actors.datasets.rows import Row


class LazyRows(Sequence[Row]):
    """Rows in the order of the files; a record that cannot be used raises a RowError where it is asked."""

    @abstractmethod
    def row_at(self, place: int) -> Row:
        """Raises: RowError: the record there cannot be used."""

    @abstractmethod
    def name(self, place: int) -> str:
        """The file and the place in it."""

    @abstractmethod
    def chosen(self, places: np.ndarray, difficulty: np.ndarray | None = None) -> LazyRows:
        """Some of the rows: `places` int64 [N], sorted, with their `difficulty` float64 [N] for a curriculum."""

    @abstractmethod
    def endless(self, seed: int) -> EndlessRows:
        """The rows without end, in the order that a run asks them."""

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | Sequence[Row]:
        if isinstance(place, slice):
            return [self.row_at(i) for i in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self.row_at(place)
