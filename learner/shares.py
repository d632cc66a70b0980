"""Shares of a step: which rank trains which groups, and how a rank fetches them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, count
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch.distributed as dist

from mobula.cluster.errors import LostObjectError, WrongGroupError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.batch import LearnerItem, RowOf, fetch_items, minibatches_of, without_overlong
from mobula.learner.critic import ValueRow
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.policies.base import NO_TOKENS, RowOutline
from mobula.learner.policies.trained import row_of

# Portions: the references of a step that each rank receives, so that their number grows with the groups alone.
#
# The owner of an object notes each process that holds a reference to it. References to all groups on all ranks cost the
# driver time in proportion to ranks times groups.


class Elsewhere(Enum):
    """Stands for a reference that this rank has not received."""

    REFERENCE = "reference"


ELSEWHERE = Elsewhere.REFERENCE
GROUPS, ROWS = "groups", "supervised rows"  # kinds of entries
T = TypeVar("T")


@dataclass(frozen=True)
class Portion:
    """The references that one rank receives in a call."""

    references: Mapping[int, tuple[Any, Any]]  # index of the group -> the group and its reference log-probs
    is_final: bool  # the references follow from exact sizes, not from summaries


class UnplannedShareError(Exception):
    """Raised by every rank before any state changes: exact sizes assign groups or rows to ranks that have no references
    to them. The call is repeated with these references."""

    def __init__(self, kind: str, missing: Sequence[Sequence[int]]) -> None:
        """`missing` has for each rank the indices of the entries of `kind` that it has no references to."""
        super().__init__(kind, missing)
        self.kind = kind
        self.missing = missing


Planner = Callable[[Sequence[ScoredGroup], int, int], list[set[int]]]
"""(groups, version, ranks) -> the groups that each rank fetches first."""


async def in_portions(
    call: Callable[[Any, Sequence[Portion | None]], Awaitable[T]],
    groups: Sequence[ScoredGroup],
    version: int,
    *,
    num_ranks: int,
    planned: Planner | None,
    put: Callable[[Any], Any],
    kind: str = GROUPS,
) -> T:
    """Calls all ranks with the groups of the step that makes `version`, and returns the result.

    Args:
        call: takes a reference to the groups, and the portion of each rank: None if the groups have their references.
        planned: None sends every reference to every rank.
        put: stores a value once for all ranks and returns a reference to it.
        kind: `Entries.kind` of the groups. An UnplannedShareError of another kind is raised.
    """
    if planned is None or num_ranks == 1:
        return await call(put(groups), [None] * num_ranks)
    held = planned(groups, version, num_ranks)
    outlines = put([  # without references: the same value for every rank
        replace(g, group=ELSEWHERE, reference_logprobs=None if g.reference_logprobs is None else ELSEWHERE)
        for g in groups
    ])  # fmt: skip
    try:
        return await call(outlines, portions_of(groups, held, is_final=False))
    except UnplannedShareError as error:
        if error.kind != kind:
            raise
        held = [own.union(missing) for own, missing in zip(held, error.missing, strict=True)]
    return await call(outlines, portions_of(groups, held, is_final=True))


def as_argument(portion: Portion | None, name: str = "portion") -> dict[str, Portion]:
    return {} if portion is None else {name: portion}


def portions_of(groups: Sequence[ScoredGroup], held: Sequence[set[int]], *, is_final: bool) -> list[Portion]:
    """Returns the portion of each rank; `held` has for each rank the indices of its groups."""
    return [
        Portion({n: (groups[n].group, groups[n].reference_logprobs) for n in sorted(own)}, is_final) for own in held
    ]


def with_portion(outlines: Sequence[ScoredGroup], portion: Portion | None) -> list[ScoredGroup]:
    """Returns the groups with the references of the portion; without a portion they are complete already."""
    groups = list(outlines)
    references = {} if portion is None else portion.references
    for n, (group, logprobs) in references.items():
        groups[n] = replace(groups[n], group=group, reference_logprobs=logprobs)
    return groups


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

    def __len__(self) -> int: ...

    def expected(self) -> Sequence[E]:
        """Outlines with the sizes that summaries predict."""

    def wanted(self, entries: Sequence[E], num_ranks: int) -> list[set[int]]:
        """For each rank, the indices of the entries that its forward passes need."""

    @property
    def is_planned(self) -> bool:
        """Whether this rank has references to its planned share alone."""

    def fetch(self, indices: Sequence[int]) -> list[E]:
        """Fetches whole entries.

        Raises:
            LostObjectError: an entry is lost.
            WrongGroupError: an entry has another content than its source reported.
        """

    def outline(self, entry: E, index: int) -> Any:
        """Builds the outline of a whole entry for other ranks."""

    def restored(self, outline: Any) -> E:
        """Restores an entry from an outline, with the exact size and all fields that other ranks compute with."""


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
        """Returns all entries in order: whole entries of this rank's share, outlines of the others. Collective."""
        if self._world_size == 1:
            return entries.fetch(range(len(entries)))
        held, owned = planned_shares(entries, self._world_size)
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
    try:
        return dict(zip(sorted(indices), entries.fetch(sorted(indices)), strict=True)), None
    except (LostObjectError, WrongGroupError) as error:
        return {}, error


def planned_shares(entries: Entries[E], num_ranks: int) -> tuple[list[set[int]], list[set[int]]]:
    """For each rank, the entries that it fetches first, and those of them whose outlines it sends.

    The time grows with the entries and ranks, not with their product.
    """
    wanted = entries.wanted(entries.expected(), num_ranks)
    owned = _owned(wanted, len(entries))
    return [needed | own for needed, own in zip(wanted, owned, strict=True)], owned


def planned_by(entries_of: Callable[[Sequence[ScoredGroup], int], Entries[Any]]) -> Planner:
    """Returns a planner: each rank fetches first what the summaries assign to it."""
    return lambda groups, version, num_ranks: planned_shares(entries_of(groups, version), num_ranks)[0]


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


NOTHING = np.empty(0, dtype=np.float32)
NO_MASK = np.empty(0, dtype=np.bool_)


@dataclass(frozen=True)
class ItemOutline:
    """A LearnerItem without token ids, latents and media, to send to other ranks: a bit and a few numbers a token, and
    8 bytes more if credit reads log-probs."""

    item: LearnerItem  # without mask and ages
    mask: bytes  # packed bits of `loss_mask`
    ages: tuple[np.ndarray, np.ndarray]  # int32: run-length encoded ages, (age, length of the run)

    @classmethod
    def of(cls, item: LearnerItem, config: RunConfig) -> ItemOutline:
        """Builds the outline of an item without credit: equal masks, zero advantages."""
        algorithm, key = config.algorithm, config.rewards.label_key
        ids = item.response_ids if algorithm.shaping.repetition_penalty > 0 else NO_TOKENS
        bare = replace(
            item,
            sequence=RowOutline.of(item.sequence, ids),
            loss_mask=NO_MASK,
            kept_mask=NO_MASK,
            policy_mask=NO_MASK,
            ages=NO_TOKENS,
            advantages=NOTHING,
            metadata={key: item.metadata[key]} if key in item.metadata else {},
        )
        if not algorithm.credit_reads_logprobs:
            bare = replace(bare, behavior_logprobs=NOTHING, reference_logprobs=None)
        return cls(bare, np.packbits(item.loss_mask).tobytes(), _runs(item.ages))

    def restored(self) -> LearnerItem:
        """Restores an item with the fields that credit, totals and the assignment to ranks read."""
        num = self.item.sequence.num_targets
        mask = np.unpackbits(np.frombuffer(self.mask, dtype=np.uint8), count=num).astype(np.bool_)
        advantages = np.zeros(num, dtype=np.float32)
        ages = np.repeat(*self.ages)
        return replace(self.item, loss_mask=mask, kept_mask=mask, policy_mask=mask, ages=ages, advantages=advantages)


def planned_items(groups: Sequence[ScoredGroup]) -> list[list[LearnerItem]]:
    """Predicts items from summaries, to assign them to ranks: all steps sampled, none too long, without media of later
    turns."""
    numbers = count()
    return [
        [
            _planned(scored, next(numbers), group, num_steps, is_scored=reward is not None)
            for num_steps, reward in zip(scored.summary.num_steps, scored.rewards, strict=True)
        ]
        for group, scored in enumerate(groups)
    ]


def _planned(scored: ScoredGroup, index: int, group: int, num_steps: int, *, is_scored: bool) -> LearnerItem:
    mask = np.full(num_steps, is_scored)
    return LearnerItem(
        index=index,
        group=group,
        sample_id="",
        sequence=RowOutline.of_summary(scored.summary, num_steps, (num_steps,)),
        behavior_logprobs=NOTHING,
        loss_mask=mask,
        kept_mask=mask,
        policy_mask=mask,
        ages=NO_TOKENS,
        advantages=NOTHING,
        reward=None,
        metadata={},
        is_truncated=False,
        turn_rewards=(),
        reference_logprobs=None,
    )


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Run-length encoding: values, and the length of each run."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[starts], np.diff(starts, append=len(values))


Role = Literal["learner", "critic"]


def wanted_by_rank(
    groups: list[list[LearnerItem]], config: RunConfig, version: int, num_ranks: int, role: Role = "learner"
) -> list[set[int]]:
    """For each rank of a role, the indices of the items that it trains or scores in the step that makes `version`,
    including padding rows, which keep the number of forward passes equal on all ranks."""
    algorithm = config.algorithm
    everything = list(chain.from_iterable(groups))
    parts = minibatches_of(without_overlong(groups, algorithm), algorithm, (config.seed, version))
    is_reference = config.reference.place == "learner_ranks"
    passes: list[Sequence[LearnerItem | ValueRow]] = []
    if role == "learner":
        passes += [*parts, *([everything] if algorithm.needs_scoring_pass or is_reference else [])]
    if role == "critic" or algorithm.critic.place == "learner_ranks":
        passes += [[ValueRow.of(item) for item in rows] for rows in (everything, *parts)]
    wanted: list[set[int]] = [set() for _ in range(num_ranks)]
    for rows in passes:
        for own, shares in zip(wanted, shares_of_ranks(rows, config.learner, num_ranks), strict=True):
            own.update(row.index for share in shares for row in share)
    return wanted


Group = list[LearnerItem]


class StepGroups:
    """Implements `Entries`: a rank fetches the groups with at least one row of its share.

    Forward passes read the rank's own rows alone, and credit reads only fields that outlines have.
    """

    kind = GROUPS

    def __init__(
        self,
        groups: Sequence[ScoredGroup],
        version: int,
        config: RunConfig,
        row: RowOf = row_of,
        role: Role = "learner",
        portion: Portion | None = None,
    ) -> None:
        """
        Args:
            groups: with all references, or outlines of groups to which `portion` adds the references of this rank.
            version: the version that the step makes.
            role: whose ranks fetch; ranks of a separate critic need other rows than the learner's.
        """
        self._groups = with_portion(groups, portion)
        self.is_planned = portion is not None and not portion.is_final
        self._version = version
        self._config = config
        self._row = row
        self._role = role
        self._group_of_item = [n for n, scored in enumerate(groups) for _ in scored.rewards]

    def __len__(self) -> int:
        return len(self._groups)

    def expected(self) -> list[Group]:
        return planned_items(self._groups)

    def wanted(self, entries: Sequence[Group], num_ranks: int) -> list[set[int]]:
        items = wanted_by_rank(list(entries), self._config, self._version, num_ranks, self._role)
        return [{self._group_of_item[index] for index in own} for own in items]

    def fetch(self, indices: Sequence[int]) -> list[Group]:
        timeout_s = self._config.timeouts.object_s
        assert all(self._groups[n].group is not ELSEWHERE for n in indices), "groups without references on this rank"
        return fetch_items(self._groups, self._version - 1, timeout_s, self._row, indices=indices)

    def outline(self, entry: Group, index: int) -> list[ItemOutline]:
        return [ItemOutline.of(item, self._config) for item in entry]

    def restored(self, outline: list[ItemOutline]) -> Group:
        return [item.restored() for item in outline]


def planner_of(config: RunConfig, role: Role = "learner") -> Planner:
    return planned_by(lambda groups, version: StepGroups(groups, version, config, role=role))
