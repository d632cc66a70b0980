"""Lazy rows, mixtures of data sets and curricula."""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, Protocol, overload

import numpy as np

from mobula.actors.datasets.rows import R, R_co, Row, RowError
from mobula.cluster.errors import DatasetError

EpochOrder = Callable[[int, int], np.ndarray]
"""(seed, epoch) -> int64 [num_rows]: a permutation of the row indices."""


class EndlessRows(Protocol[R_co]):
    """An endless sequence of rows with random access."""

    def __len__(self) -> int:
        """Rows of one epoch."""

    def row(self, index: int) -> R_co:
        """Raises: RowError: the record is unusable."""


def endless(rows: Sequence[R], seed: int) -> EndlessRows[R]:
    """Repeats the rows endlessly, in the order that they define, or permuted in every epoch."""
    if isinstance(rows, LazyRows):
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


Stages = Callable[[np.ndarray, int], list[np.ndarray]]
"""(difficulty [N], number of stages) -> sorted positions of each stage, in the order of stages."""


def easy_first(difficulty: np.ndarray, num_stages: int) -> list[np.ndarray]:
    """The easiest rows, then harder ones, in stages of equal size.

    Example:
        >>> easy_first(np.array([3.0, 1.0, 2.0, 9.0]), 2)
        [array([1, 2]), array([0, 3])]
    """
    ranked = np.argsort(difficulty, kind="stable")
    return [np.sort(stage) for stage in np.array_split(ranked, num_stages) if len(stage)]


def hard_first(difficulty: np.ndarray, num_stages: int) -> list[np.ndarray]:
    """The hardest rows, then easier ones, in stages of equal size."""
    return easy_first(-difficulty, num_stages)


CURRICULA: Mapping[str, Stages] = {"easy_first": easy_first, "hard_first": hard_first}
PROMPT_TOKENS = "prompt_tokens"  # key for the length of the prompt


@dataclass(frozen=True)
class Curriculum:
    """The stages of the first `num_epochs` epochs; later epochs have no stages."""

    stages: Stages
    key: str  # metadata key, or PROMPT_TOKENS
    num_stages: int
    num_epochs: int

    def difficulty(self, row: Row, num_tokens: int) -> float:
        """Raises: RowError: the row's metadata has no number under the key."""
        value: Any = num_tokens if self.key == PROMPT_TOKENS else row.metadata.get(self.key)
        try:
            if isinstance(value, bool) or not math.isfinite(number := float(value)):
                raise ValueError
        except (TypeError, ValueError) as error:
            detail = f"data.curriculum.key={self.key} is {value!r:.40} in its metadata: give every row a number there"
            raise RowError("bad_difficulty", detail, row.sample_id) from error
        return number


PERIOD = 4096  # every source has its exact quota in each period of so many prompts


def shares_of(weights: Sequence[float], temperature: float) -> np.ndarray:
    """Returns float64 [S]: normalised shares weight^(1 / temperature) of the sources (arXiv:1910.10683, 3.5.2).

    Example:
        >>> shares_of([1.0, 4.0], 2.0)
        array([0.33333333, 0.66666667])
    """
    scaled = np.log(np.asarray(weights, dtype=np.float64)) / temperature
    powers = np.exp(scaled - scaled.max())
    return powers / powers.sum()


def quotas_of(shares: np.ndarray) -> np.ndarray:
    """Returns int64 [S]: prompts of each source in a period, by the largest remainder method."""
    exact = shares * PERIOD
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")
    quotas[order[: PERIOD - int(quotas.sum())]] += 1
    return quotas


class MixedRows(LazyRows[Row]):
    """The rows of several sources. In file order, sources alternate in proportion to their sizes."""

    def __init__(
        self, parts: Mapping[str, LazyRows[Row]], weights: Mapping[str, float], *, by_rows: bool, temperature: float
    ) -> None:
        """With `by_rows`, the weight of a source is multiplied by its number of rows."""
        for name, part in parts.items():
            if len(part) == 0:
                raise DatasetError(f"data.mixture.sources.{name} has no usable row: fix its rows, or remove the source")
        self._parts = dict(parts)
        self._weights = dict(weights)
        self._by_rows = by_rows
        self._temperature = temperature
        self._names = list(parts)
        sizes = [len(part) for part in parts.values()]
        effective = [weights[name] * (size if by_rows else 1) for name, size in zip(self._names, sizes, strict=True)]
        self.shares = shares_of(effective, temperature)
        self._quotas = quotas_of(self.shares)
        for name, share, quota in zip(self._names, self.shares, self._quotas, strict=True):
            if quota == 0:
                raise DatasetError(
                    f"data.mixture.sources.{name} has a share of {share:.2g}, less than one in {PERIOD} prompts: raise "
                    "its weight or data.mixture.temperature, or remove it"
                )

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts.values())

    def row_at(self, index: int) -> Row:
        source, row = self._locate(index)
        name = self._names[source]
        return _from_source(name, self._parts[name].row_at, row)

    def name(self, index: int) -> str:
        source, row = self._locate(index)
        return f"{self._names[source]}:{self._parts[self._names[source]].name(row)}"

    def chosen(self, indices: np.ndarray, difficulty: np.ndarray | None = None) -> MixedRows:
        sources, rows = self._file_order
        parts = {}
        for number, (name, part) in enumerate(self._parts.items()):
            is_here = sources[indices] == number
            parts[name] = part.chosen(rows[indices][is_here], None if difficulty is None else difficulty[is_here])
        return MixedRows(parts, self._weights, by_rows=self._by_rows, temperature=self._temperature)

    def endless(self, seed: int) -> Mixture:
        # The seed depends on the name alone: adding a source does not change the order of the others.
        parts = [part.endless(seed + zlib.crc32(name.encode())) for name, part in self._parts.items()]
        return Mixture(self._names, parts, self._quotas, len(self), seed)

    @cached_property
    def _file_order(self) -> tuple[np.ndarray, np.ndarray]:
        """For every row: int32 [N] source, int64 [N] index in the source. Sources alternate in proportion to sizes."""
        sizes = [len(part) for part in self._parts.values()]
        sources = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        rows = np.concatenate([np.arange(size) for size in sizes])
        order = np.argsort(np.concatenate([(np.arange(size) + 0.5) / size for size in sizes]), kind="stable")
        return sources[order], rows[order]

    def _locate(self, index: int) -> tuple[int, int]:
        sources, rows = self._file_order
        return int(sources[index]), int(rows[index])


class Mixture:
    """An endless sequence of rows in periods; a period has the exact quota of every source, shuffled."""

    def __init__(
        self, names: Sequence[str], parts: Sequence[EndlessRows[Row]], quotas: np.ndarray, num_rows: int, seed: int
    ) -> None:
        self._names = names
        self._parts = parts
        self._quotas = quotas
        self._num_rows = num_rows
        self._seed = seed
        self._period = lru_cache(maxsize=2)(self._make_period)

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Row:
        period, position = divmod(index, PERIOD)
        sources, ranks = self._period(period)
        source = int(sources[position])
        row = period * int(self._quotas[source]) + int(ranks[position])
        return _from_source(self._names[source], self._parts[source].row, row)

    def _make_period(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Two int64 [PERIOD]: the source of each prompt, and the number of earlier prompts of this source."""
        ordered = np.repeat(np.arange(len(self._quotas)), self._quotas)
        sources = np.random.default_rng([self._seed % 2**32, period, len(self._quotas)]).permutation(ordered)
        ranks = np.empty(PERIOD, dtype=np.int64)
        for source, quota in enumerate(self._quotas):
            ranks[sources == source] = np.arange(quota)
        return sources, ranks


def _from_source(name: str, read: Callable[[int], Row], index: int) -> Row:
    """Reads a row and prefixes its id with the source: ids are unique only within a source."""
    try:
        row = read(index)
    except RowError as error:
        raise RowError(error.reason, error.detail, f"{name}:{error.sample}") from error
    return replace(row, sample_id=f"{name}:{row.sample_id}")
