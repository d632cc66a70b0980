"""Mixtures: rows of several sources in given shares, in an order that can be asked at any index."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from mobula.actors.datasets.lazy_rows import EndlessRows, LazyRows
from mobula.actors.datasets.rows import Row, RowError
from mobula.cluster.errors import DatasetError

PERIOD = 4096  # prompts in which every source has its exact share


def shares_of(weights: Sequence[float], temperature: float) -> np.ndarray:
    """float64 [S]: the share of each source, weight^(1 / temperature) over the sum of all (arXiv:1910.10683, 3.5.2).

    Example:
        >>> shares_of([1.0, 4.0], 2.0)
        array([0.33333333, 0.66666667])
    """
    scaled = np.log(np.asarray(weights, dtype=np.float64)) / temperature
    powers = np.exp(scaled - scaled.max())
    return powers / powers.sum()


def quotas_of(shares: np.ndarray) -> np.ndarray:
    """int64 [S]: how many of PERIOD prompts each source gives; rounded down, the largest remainders get the rest."""
    exact = shares * PERIOD
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")
    quotas[order[: PERIOD - int(quotas.sum())]] += 1
    return quotas


class MixedRows(LazyRows[Row]):
    """The rows of several sources. In file order they stand in proportion to the sizes of their sources."""

    def __init__(
        self, parts: Mapping[str, LazyRows[Row]], weights: Mapping[str, float], *, by_rows: bool, temperature: float
    ) -> None:
        """With `by_rows` a weight counts once for each row of its source.

        Raises:
            DatasetError: a source has no row, or so small a share that it would never be asked.
        """
        for name, part in parts.items():
            if len(part) == 0:
                raise DatasetError(f"data.sources.{name} has no usable row: fix its rows, or remove the source")
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
                    f"data.sources.{name} has a share of {share:.2g}, less than one in {PERIOD} prompts: raise its "
                    "weight or data.temperature, or remove it"
                )

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts.values())

    def row_at(self, place: int) -> Row:
        source, own = self._find(place)
        name = self._names[source]
        return _from_source(name, self._parts[name].row_at, own)

    def name(self, place: int) -> str:
        source, own = self._find(place)
        return f"{self._names[source]}:{self._parts[self._names[source]].name(own)}"

    def chosen(self, places: np.ndarray, difficulty: np.ndarray | None = None) -> MixedRows:
        sources, own = self._places
        parts = {}
        for number, (name, part) in enumerate(self._parts.items()):
            here = sources[places] == number
            parts[name] = part.chosen(own[places][here], None if difficulty is None else difficulty[here])
        return MixedRows(parts, self._weights, by_rows=self._by_rows, temperature=self._temperature)

    def endless(self, seed: int) -> Mixture:
        """Each source has an order of its own, which does not change when another source is added."""
        parts = [part.endless(seed + zlib.crc32(name.encode())) for name, part in self._parts.items()]
        return Mixture(self._names, parts, self._quotas, len(self), seed)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [N] source and int64 [N] place in it, of every row: sources alternate in proportion to their sizes."""
        sizes = [len(part) for part in self._parts.values()]
        sources = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        own = np.concatenate([np.arange(size) for size in sizes])
        order = np.argsort(np.concatenate([(np.arange(size) + 0.5) / size for size in sizes]), kind="stable")
        return sources[order], own[order]

    def _find(self, place: int) -> tuple[int, int]:
        sources, own = self._places
        return int(sources[place]), int(own[place])


class Mixture:
    """Prompt after prompt from the sources, each PERIOD of them with the exact quota of every source, shuffled."""

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
        own = period * int(self._quotas[source]) + int(ranks[position])
        return _from_source(self._names[source], self._parts[source].row, own)

    def _make_period(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [PERIOD]: the source of each prompt, and how many prompts of this source are before it."""
        ordered = np.repeat(np.arange(len(self._quotas)), self._quotas)
        sources = np.random.default_rng([self._seed % 2**32, period, len(self._quotas)]).permutation(ordered)
        ranks = np.empty(PERIOD, dtype=np.int64)
        for source, quota in enumerate(self._quotas):
            ranks[sources == source] = np.arange(quota)
        return sources, ranks


def _from_source(name: str, read: Callable[[int], Row], place: int) -> Row:
    """The row with its source in front of its id, as ids of several sources may be the same.

    Raises:
        RowError: the record there cannot be used; its name begins with the source, too.
    """
    try:
        row = read(place)
    except RowError as error:
        raise RowError(error.reason, error.detail, f"{name}:{error.sample}") from error
    return replace(row, sample_id=f"{name}:{row.sample_id}")
