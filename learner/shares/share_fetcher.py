"""ShareFetcher: fetches the entries of a step that are assigned to a rank, and outlines of all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from mobula.cluster.errors import LostObjectError, WrongGroupError
from mobula.learner.shares.portions import UnplannedShareError

Exchange = Callable[[Any], Sequence[Any]]
"""Sends a value to every rank and returns the values of all ranks. Collective."""

E = TypeVar("E")
FetchError = LostObjectError | WrongGroupError


def all_ranks(value: Any) -> Sequence[Any]:
    """The Exchange of the process group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Entries(Protocol[E]):
    """References to the groups or dataset rows of a step. An `E` is a whole entry or an outline with its size."""

    @property
    def kind(self) -> str:
        """Name of these entries: a step may fetch groups and supervised rows."""
        ...

    def __len__(self) -> int: ...

    def expected(self) -> Sequence[E]:
        """Outlines with the sizes that summaries predict."""
        ...

    def wanted(self, entries: Sequence[E], num_ranks: int) -> list[set[int]]:
        """For each rank, the indices of the entries that its forward passes need."""
        ...

    @property
    def is_planned(self) -> bool:
        """Whether this rank has references to its planned share alone."""
        ...

    def fetch(self, indices: Sequence[int]) -> list[E]:
        """Fetches whole entries.

        Raises:
            LostObjectError: an entry is lost.
            WrongGroupError: an entry has another content than its source reported.
        """
        ...

    def outline(self, entry: E, index: int) -> Any:
        """Builds the outline of a whole entry for other ranks."""
        ...

    def restored(self, outline: Any) -> E:
        """Restores an entry from an outline, with the exact size and all fields that other ranks compute with."""
        ...


@dataclass(frozen=True)
class RankReport:
    """Message to all ranks: outlines of entries by index, or the error if this rank could not fetch its share."""

    outlines: Mapping[int, Any] = field(default_factory=dict)
    error: FetchError | None = None


class ShareFetcher:
    """Fetches the entries of this rank's share and outlines of the others.

    Entries are assigned to ranks by size. Each rank first fetches the share that follows from the approximate sizes of
    summaries. The ranks then exchange outlines with exact sizes, compute the exact shares, and fetch missing entries.
    All ranks compute the same shares.

    Example:
        shares = ShareFetcher(rank, world_size, all_ranks)
        groups = shares.fetch(StepGroups(scored, version=1, config=config))
    """

    def __init__(self, rank: int, world_size: int, exchange: Exchange, role: str = "learner") -> None:
        """`role` names the rank in errors, as `ROLE/INDEX`."""
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._role = role

    def fetch(self, entries: Entries[E]) -> list[E]:
        """Returns all entries in order: whole entries of this rank's share, outlines of the others. Collective.

        Raises:
            LostObjectError: on every rank, if any rank could not fetch an entry.
            WrongGroupError: on every rank, if any rank fetched an entry with another content than its source reported.
            UnplannedShareError: on every rank, if any rank has no reference to an entry of its exact share.
        """
        if self._world_size == 1:
            return entries.fetch(range(len(entries)))
        held, owned = planned_shares(entries, entries.expected(), self._world_size)
        whole, error = _fetched(entries, held[self._rank])
        completed = self._completed(entries, whole, error, owned[self._rank])
        # Rows with media of later turns are larger than summaries predict: compute the shares again from exact sizes.
        exact = entries.wanted(completed, self._world_size)
        missing = [wanted - fetched for wanted, fetched in zip(exact, held, strict=True)]
        if any(missing):
            if entries.is_planned:
                raise UnplannedShareError(entries.kind, [sorted(indices) for indices in missing])
            more, error = _fetched(entries, missing[self._rank])
            # On every rank, also without an error: a rank that raises alone leaves the others in a collective.
            self._exchanged(RankReport(error=error))
            completed = [more.get(index, entry) for index, entry in enumerate(completed)]
        return completed

    def _completed(
        self, entries: Entries[E], whole: Mapping[int, E], error: FetchError | None, owned: set[int]
    ) -> list[E]:
        """All entries: those fetched here, and the others restored from outlines."""
        outlines = {index: entries.outline(whole[index], index) for index in owned & whole.keys()}
        reports = self._exchanged(RankReport(outlines, error))
        elsewhere = {index: outline for report in reports for index, outline in report.outlines.items()}
        return [whole[index] if index in whole else entries.restored(elsewhere[index]) for index in range(len(entries))]

    def _exchanged(self, own: RankReport) -> Sequence[RankReport]:
        reports: Sequence[RankReport] = self._exchange(own)
        errors = [(f"{self._role}/{rank}: {report.error}", report.error) for rank, report in enumerate(reports)]
        if wrong := [text for text, error in errors if isinstance(error, WrongGroupError)]:
            raise WrongGroupError("; ".join(wrong))
        if lost := [text for text, error in errors if error is not None]:
            raise LostObjectError("; ".join(lost))
        return reports


def _fetched(entries: Entries[E], indices: set[int]) -> tuple[dict[int, E], FetchError | None]:
    """Fetches entries; returns them by index, or nothing and the error."""
    try:
        return dict(zip(sorted(indices), entries.fetch(sorted(indices)), strict=True)), None
    except (LostObjectError, WrongGroupError) as error:
        return {}, error


def planned_shares(entries: Entries[E], known: Sequence[E], num_ranks: int) -> tuple[list[set[int]], list[set[int]]]:
    """For each rank, the entries that it fetches first, and those of them whose outlines it sends.

    The time grows with the entries and ranks, not with their product.
    """
    wanted = entries.wanted(known, num_ranks)
    owned = _owned(wanted, len(entries))
    return [needed | own for needed, own in zip(wanted, owned, strict=True)], owned


def _owned(held: Sequence[set[int]], num: int) -> list[set[int]]:
    """For each rank, the entries that it sends outlines of: the first rank that fetches an entry, else round robin."""
    first: dict[int, int] = {}  # entry -> rank
    for rank, own in enumerate(held):
        for index in own:
            first.setdefault(index, rank)
    owned: list[set[int]] = [set() for _ in held]
    for index in range(num):
        owned[first.get(index, index % len(held))].add(index)
    return owned
