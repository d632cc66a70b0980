"""ShareFetcher: a rank's way from references to the entries of a step to those that it takes through a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from mobula.cluster.errors import LostObjectError

Exchange = Callable[[Any], Sequence[Any]]
"""Gives a value to every rank and returns those of all, by rank. Collective."""

E = TypeVar("E")


def all_ranks(value: Any) -> Sequence[Any]:
    """The Exchange of the process group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Entries(Protocol[E]):
    """References to what a step is made of: groups, or rows of a data set. An `E` is whole, or only its size."""

    def __len__(self) -> int: ...

    def expected(self) -> Sequence[E]:
        """Each by its size, as its summary lets expect it."""
        ...

    def wanted(self, entries: Sequence[E], num_ranks: int) -> list[set[int]]:
        """For each rank the places of the entries that it takes through a network."""
        ...

    def fetch(self, places: Sequence[int]) -> list[E]:
        """Those at some places, whole.

        Raises:
            LostObjectError: one of them is gone.
        """
        ...

    def outline(self, entry: E, place: int) -> Any:
        """Outline of a whole entry, which other ranks receive."""
        ...

    def restored(self, outline: Any) -> E:
        """Entry that other ranks restore from an outline: its exact size, and all else that they compute with."""
        ...


@dataclass(frozen=True)
class RankReport:
    """Sent to all ranks: outlines of entries by their place, or why this rank could not fetch its own."""

    outlines: Mapping[int, Any] = field(default_factory=dict)
    lost: str = ""


class ShareFetcher:
    """Fetches the entries that this rank takes through a network. Of the others it gets outlines.

    Entries are shared out by size. Each rank first fetches those that summaries, which have approximate sizes, assign
    to it. Outlines with exact sizes are then exchanged, and what the summaries missed is fetched. Every rank comes to
    the same shares, so the numbers are those of all entries on every rank.

    Example:
        shares = ShareFetcher(rank, world_size, all_ranks)
        groups = shares.fetch(StepGroups(scored, version=1, config=config))
    """

    def __init__(self, rank: int, world_size: int, exchange: Exchange, role: str = "learner") -> None:
        """Errors call a rank `ROLE/INDEX`."""
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._role = role

    def fetch(self, entries: Entries[E]) -> list[E]:
        """All entries, in order: this rank's share whole. Collective.

        Raises:
            LostObjectError: on every rank, if one of them could not fetch an entry.
        """
        if self._world_size == 1:
            return entries.fetch(range(len(entries)))
        held = entries.wanted(entries.expected(), self._world_size)
        owned = _owned(held, len(entries))
        held = [some | own for some, own in zip(held, owned, strict=True)]
        whole, lost = _fetched(entries, held[self._rank])
        found = self._completed(entries, whole, lost, owned[self._rank])
        # Rows with media of later turns are larger than summaries say: shares are computed again from exact sizes.
        exact = entries.wanted(found, self._world_size)
        missing = [wanted - had for wanted, had in zip(exact, held, strict=True)]
        if any(missing):
            more, lost = _fetched(entries, missing[self._rank])
            # Also with nothing lost: a rank that raised alone would leave the others in their next collective.
            self._exchanged(RankReport(lost=lost))
            found = [more.get(place, entry) for place, entry in enumerate(found)]
        return found

    def _completed(self, entries: Entries[E], whole: Mapping[int, E], lost: str, owned: set[int]) -> list[E]:
        """All entries: those fetched here, and what outlines give of the others."""
        outlines = {place: entries.outline(whole[place], place) for place in owned & whole.keys()}
        reports = self._exchanged(RankReport(outlines, lost))
        elsewhere = {place: outline for report in reports for place, outline in report.outlines.items()}
        return [whole[place] if place in whole else entries.restored(elsewhere[place]) for place in range(len(entries))]

    def _exchanged(self, own: RankReport) -> Sequence[RankReport]:
        reports: Sequence[RankReport] = self._exchange(own)
        lost = {f"{self._role}/{rank}: {report.lost}" for rank, report in enumerate(reports) if report.lost}
        if lost:
            raise LostObjectError("; ".join(sorted(lost)))
        return reports


def _fetched(entries: Entries[E], places: set[int]) -> tuple[dict[int, E], str]:
    """The entries at some places, or why there are none."""
    try:
        found = entries.fetch(sorted(places))
    except LostObjectError as error:
        return {}, str(error)
    return dict(zip(sorted(places), found, strict=True)), ""


def _owned(held: Sequence[set[int]], num: int) -> list[set[int]]:
    """For each rank the entries whose outlines it sends: the first rank that fetches one, else the ranks in turn."""
    owned: list[set[int]] = [set() for _ in held]
    for index in range(num):
        holders = [rank for rank, own in enumerate(held) if index in own]
        owned[holders[0] if holders else index % len(held)].add(index)
    return owned
