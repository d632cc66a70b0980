"""Mixtures: rows of several sources in given shares, in an endless order with random access."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from mobula.actors.datasets.lazy_rows import EndlessRows, LazyRows
from mobula.actors.datasets.rows import Row, RowError
from mobula.cluster.errors import DatasetError

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
        """With `by_rows`, the weight of a source is multiplied by its number of rows.

        Raises:
            DatasetError: a source has no row, or a share below one prompt in a period.
        """
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
    """Reads a row and prefixes its id with the source: ids are unique only within a source.

    Raises:
        RowError: the record is unusable; the sample's name has the same prefix.
    """
    try:
        row = read(index)
    except RowError as error:
        raise RowError(error.reason, error.detail, f"{name}:{error.sample}") from error
    return replace(row, sample_id=f"{name}:{row.sample_id}")
