"""StepGroups: the groups of an RL step as ranks share them out."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.batch import LearnerItem, RowOf, fetch_items
from mobula.learner.policies.trained import row_of
from mobula.learner.shares.outlines import ItemOutline, planned_items
from mobula.learner.shares.wanted import Role, wanted_by_rank

Group = list[LearnerItem]


class StepGroups:
    """Implements `Entries`: a rank fetches the groups of which it takes some row through a network.

    A rank computes with its own rows alone, and credit reads only fields that outlines have.
    """

    def __init__(
        self,
        groups: Sequence[ScoredGroup],
        version: int,
        config: RunConfig,
        row: RowOf = row_of,
        role: Role = "learner",
    ) -> None:
        """The groups of the step that makes `version`. `role` is whose ranks share them out: those of a critic with its
        own take other rows through a network."""
        self._groups = groups
        self._version = version
        self._config = config
        self._row = row
        self._role = role
        self._places = [place for place, scored in enumerate(groups) for _ in scored.rewards]  # of all items

    def __len__(self) -> int:
        return len(self._groups)

    def expected(self) -> list[Group]:
        return planned_items(self._groups)

    def wanted(self, entries: Sequence[Group], num_ranks: int) -> list[set[int]]:
        items = wanted_by_rank(entries, self._config, self._version, num_ranks, self._role)
        return [{self._places[index] for index in own} for own in items]

    def fetch(self, places: Sequence[int]) -> list[Group]:
        timeout_s = self._config.timeouts.object_s
        return fetch_items(self._groups, self._version - 1, timeout_s, self._row, places=places)

    def outline(self, entry: Group, place: int) -> list[ItemOutline]:
        return [ItemOutline.of(item, self._config) for item in entry]

    def restored(self, outline: list[ItemOutline]) -> Group:
        return [item.restored() for item in outline]
