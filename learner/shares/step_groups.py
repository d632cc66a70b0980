"""StepGroups: the groups of an RL step as entries of a ShareFetcher, and their outlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np

from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.batch import LearnerItem, RowOf, fetch_items, minibatches_of, without_overlong
from mobula.learner.critic.rows import ValueRow
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.policies.base import NO_TOKENS, RowOutline
from mobula.learner.policies.trained import row_of
from mobula.learner.shares.portions import ELSEWHERE, GROUPS, Planner, Portion, with_portion
from mobula.learner.shares.share_fetcher import planned_shares

NOTHING = np.empty(0, dtype=np.float32)
NO_MASK = np.empty(0, dtype=np.bool_)
UNKNOWN = ""  # for fields that summaries lack


@dataclass(frozen=True)
class ItemOutline:
    """A LearnerItem without token ids, latents and media, to send to other ranks: a bit and a few numbers a token, and
    8 bytes more if credit reads log-probs.
    """

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
    turns.
    """
    planned: list[list[LearnerItem]] = []
    index = 0
    for group, scored in enumerate(groups):
        row = [
            _planned(scored, index + n, group, num_steps, is_scored=reward is not None)
            for n, (num_steps, reward) in enumerate(zip(scored.summary.num_steps, scored.rewards, strict=True))
        ]
        planned.append(row)
        index += len(row)
    return planned


def _planned(scored: ScoredGroup, index: int, group: int, num_steps: int, *, is_scored: bool) -> LearnerItem:
    summary = scored.summary
    media = tuple(MediaHandle(key, UNKNOWN, 0, None) for key in summary.media_keys)
    mask = np.full(num_steps, is_scored)
    return LearnerItem(
        index=index,
        group=group,
        sample_id=UNKNOWN,
        sequence=RowOutline(num_steps, summary.num_prompt_tokens, (num_steps,), summary.num_media_tokens, media),
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
    including padding rows, which keep the number of forward passes equal on all ranks.
    """
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
    """Returns the planner of a role: each rank fetches first what the summaries assign to it."""

    def planned(groups: Sequence[ScoredGroup], version: int, num_ranks: int) -> list[set[int]]:
        entries = StepGroups(groups, version, config, role=role)
        held, _ = planned_shares(entries, entries.expected(), num_ranks)
        return held

    return planned
