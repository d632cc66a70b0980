"""StepFetcher: a rank's way from references to the groups of a step to the items that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from cluster.errors import LostObjectError
from cluster.records.trajectory import ScoredGroup
from configs.schema import RunConfig
from learner.batch import LearnerItem, RowOf, fetch_items
from learner.policies.trained import row_of
from learner.shares.outlines import ItemOutline, planned_items
from learner.shares.wanted import Role, wanted_by_rank

Exchange = Callable[[Any], Sequence[Any]]
"""Gives a value to every rank and returns those of all, by rank. Collective."""

Fetched = Mapping[int, list[LearnerItem]]
"""The place of a group in the step -> its trajectories."""


def all_ranks(value: Any) -> Sequence[Any]:
    """The Exchange of the process group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True)
class RankReport:
    """Sent to all ranks: outlines of groups by their place in the step, or why this rank could not fetch its own."""

    outlines: Mapping[int, list[ItemOutline]] = field(default_factory=dict)
    lost: str = ""


class StepFetcher:
    """Fetches the groups of which this rank takes some row through a network. Of the others it gets outlines.

    Rows are shared out by size. Each rank first fetches the groups that summaries, which have approximate sizes, assign
    to it. Outlines with exact sizes are then exchanged, and groups that the summaries missed (media of later turns) are
    fetched. The numbers are the same as with all groups on every rank: a rank computes with its own rows alone, and
    credit reads only fields that outlines have.

    Example:
        groups = StepFetcher(config, rank, world_size, all_ranks).fetch(scored, version=1)
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        world_size: int,
        exchange: Exchange,
        row: RowOf = row_of,
        role: Role = "learner",
    ) -> None:
        """`role` is whose ranks these are: those of a critic with its own take other rows through a network."""
        self._role = role
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._row = row

    def fetch(self, groups: Sequence[ScoredGroup], version: int) -> list[list[LearnerItem]]:
        """The items of the step that makes `version`, in order. Collective.

        Raises:
            LostObjectError: on every rank, if one of them could not fetch a group.
        """
        if self._world_size == 1:
            return fetch_items(groups, version - 1, self._config.timeouts.object_s, self._row)
        places = [place for place, scored in enumerate(groups) for _ in scored.rewards]
        held = _groups_of(self._wanted(planned_items(groups), version), places)
        owned = _owned(held, len(groups))
        held = [some | own for some, own in zip(held, owned, strict=True)]
        whole, lost = self._fetched(groups, held[self._rank], version)
        items = self._completed(whole, lost, owned, len(groups))
        exact = _groups_of(self._wanted(items, version), places)
        missing = [wanted - had for wanted, had in zip(exact, held, strict=True)]
        if any(missing):
            more, lost = self._fetched(groups, missing[self._rank], version)
            self._exchanged(RankReport(lost=lost))
            items = [more.get(place, row) for place, row in enumerate(items)]
        return items

    def _wanted(self, items: list[list[LearnerItem]], version: int) -> list[set[int]]:
        return wanted_by_rank(items, self._config, version, self._world_size, self._role)

    def _fetched(self, groups: Sequence[ScoredGroup], places: set[int], version: int) -> tuple[Fetched, str]:
        """The items of some groups, or why there are none."""
        timeout_s = self._config.timeouts.object_s
        try:
            rows = fetch_items(groups, version - 1, timeout_s, self._row, places=sorted(places))
        except LostObjectError as error:
            return {}, str(error)
        return dict(zip(sorted(places), rows, strict=True)), ""

    def _completed(
        self, whole: Fetched, lost: str, owned: Sequence[set[int]], num_groups: int
    ) -> list[list[LearnerItem]]:
        """All groups: complete items of those fetched here, outlines of the others."""
        mine = owned[self._rank] & whole.keys()
        outlines = {place: [ItemOutline.of(item, self._config) for item in whole[place]] for place in mine}
        reports = self._exchanged(RankReport(outlines, lost))
        elsewhere = {place: rows for report in reports for place, rows in report.outlines.items()}
        return [
            whole[place] if place in whole else [outline.restored() for outline in elsewhere[place]]
            for place in range(num_groups)
        ]

    def _exchanged(self, own: RankReport) -> Sequence[RankReport]:
        reports: Sequence[RankReport] = self._exchange(own)
        lost = {f"learner/{rank}: {report.lost}" for rank, report in enumerate(reports) if report.lost}
        if lost:
            raise LostObjectError("; ".join(sorted(lost)))
        return reports


def _groups_of(wanted: Sequence[set[int]], places: Sequence[int]) -> list[set[int]]:
    """The groups of the items that each rank wants; `places` are those of all items."""
    return [{places[index] for index in own} for own in wanted]


def _owned(held: Sequence[set[int]], num_groups: int) -> list[set[int]]:
    """For each rank the groups whose outlines it sends: the first rank that fetches a group, else the ranks in turn."""
    owned: list[set[int]] = [set() for _ in held]
    for place in range(num_groups):
        holders = [rank for rank, own in enumerate(held) if place in own]
        owned[holders[0] if holders else place % len(held)].add(place)
    return owned
