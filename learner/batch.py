"""Converts scored groups to micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.errors import WrongGroupError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import GroupSummary, Prompt, Reward, ScoredGroup, TrajectoryGroup, group_digest
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.configs.schema import AlgorithmConfig
from mobula.learner.algorithms.policy_losses import Totals
from mobula.learner.policies.base import PolicyRow, RowOutline
from mobula.learner.policies.batch import TokenSequence, column
from mobula.learner.policies.trained import PolicyBatch, collate_rows, row_of

RowOf = Callable[[Prompt, Any], PolicyRow]  # a prompt and what the policy did after it -> a row to score
SAME_ENTROPY = 1e-4  # nat: entropies of one distribution differ by less, computed in other batches


@dataclass(frozen=True)
class LearnerItem:
    """One trajectory of the learner. A truncated response ends in its last sampled token, never in an EOS."""

    index: int  # among all trajectories of the step
    group: int  # index of the group in the step
    sample_id: str  # of the row of the data that its prompt is
    sequence: PolicyRow
    behavior_logprobs: np.ndarray  # float32 [T]
    loss_mask: np.ndarray  # bool [T]: True where a token is trained; these count where a mean is taken
    kept_mask: np.ndarray  # bool [T]: those of them that have a loss
    policy_mask: np.ndarray  # bool [T]: those of the kept that the policy loss trains
    ages: np.ndarray  # int32 [T], versions: the one trained from less the one that sampled a token
    advantages: np.ndarray  # float32 [T]
    reward: Reward | None
    metadata: Mapping[str, Any]  # of the prompt
    is_truncated: bool  # the response or the episode was cut
    turn_rewards: tuple[float, ...]  # of an episode: what its environment paid for each turn
    reference_logprobs: np.ndarray | None  # float32 [T]
    old_logprobs: np.ndarray | None = None  # float32 [T], of the weights that the step trains from
    entropies: np.ndarray | None = None  # float32 [T], of the same weights
    values: np.ndarray | None = None  # float32 [T + 1], of a critic: before each token, and after the last one
    returns: np.ndarray | None = None  # float32 [T], what the critic is trained on

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def response_ids(self) -> np.ndarray:
        """int [T]"""
        row = self.sequence
        assert isinstance(row, TokenSequence | RowOutline), "other actions than tokens have no ids"
        return row.token_ids[row.num_context :]

    def num_older(self, age: int) -> int:
        """Returns the number of trained tokens older than `age`."""
        return int((self.loss_mask & (self.ages > age)).sum())

    def without_loss(self) -> LearnerItem:
        """Returns the row without loss; its tokens still count in means."""
        nothing = np.zeros_like(self.loss_mask)
        return replace(self, kept_mask=nothing, policy_mask=nothing)

    def untrained(self) -> LearnerItem:
        return replace(self.without_loss(), loss_mask=np.zeros_like(self.loss_mask))


@dataclass(frozen=True)
class LearnerBatch:
    """Padded columns of a micro-batch; padding is 0 and False."""

    inputs: PolicyBatch
    behavior_logprobs: Tensor  # float32 [B, T]
    loss_mask: Tensor  # bool [B, T]
    kept_mask: Tensor  # bool [B, T]
    policy_mask: Tensor  # bool [B, T]
    ages: Tensor  # int32 [B, T]
    advantages: Tensor  # float32 [B, T]
    old_logprobs: Tensor | None  # float32 [B, T]
    reference_logprobs: Tensor | None  # float32 [B, T]


def fetch_items(
    groups: Sequence[ScoredGroup],
    version: int,
    timeout_s: float,
    row: RowOf = row_of,
    indices: Sequence[int] | None = None,
) -> list[list[LearnerItem]]:
    """Fetches the trajectories of the groups at `indices` (default: all). Media are not fetched.

    Token ages are relative to `version`, which the step trains from; advantages are 0. A trajectory without a reward
    (None) is not trained. `row` builds the scored row of a prompt and its actions: one target for each step, or one
    for the whole trajectory.
    """
    chosen = range(len(groups)) if indices is None else indices
    some = [groups[n] for n in chosen]
    fetched: list[TrajectoryGroup] = fetch_or_miss([g.group for g in some], timeout_s=timeout_s, what="groups")
    for scored, group in zip(some, fetched, strict=True):
        check_digest(scored.summary, group)
    references = fetch_or_miss([g.reference_logprobs for g in some], timeout_s=timeout_s, what="reference log-probs")
    ids = {group.summary.group_id: n for n, group in enumerate(groups)}
    starts = [0, *accumulate(len(group.rewards) for group in groups)]
    return [
        [
            _item(group, i, reward, reference, version, row, starts[n] + i, ids[groups[n].summary.group_id])
            for i, reward in enumerate(groups[n].rewards)
        ]
        for n, group, reference in zip(chosen, fetched, references, strict=True)
    ]


def check_digest(summary: GroupSummary, group: TrajectoryGroup) -> None:
    """Compares the content of a fetched group with the digest that its rollout actor computed."""
    if summary.sha256 and (found := group_digest(group)) != summary.sha256:
        raise WrongGroupError(
            f"group {summary.group_id} has sha256 {found}, and its rollout actor reported {summary.sha256}: the object "
            "was altered between the two, or another one was fetched; check memory and network of the nodes, then go "
            "on with resume=auto"
        )


def _item(
    group: TrajectoryGroup,
    sibling: int,
    reward: Reward | None,
    references: Sequence[np.ndarray] | None,
    version: int,
    row: RowOf,
    index: int,
    group_index: int,
) -> LearnerItem:
    trajectory = group.trajectories[sibling]
    sequence = row(group.prompt, trajectory.actions)
    last = slice(trajectory.num_steps - sequence.num_targets, None)
    mask = trajectory.action_mask[last] & (reward is not None)
    return LearnerItem(
        index=index,
        group=group_index,
        sample_id=group.prompt.sample_id,
        sequence=sequence,
        behavior_logprobs=trajectory.behavior_logprobs[last],
        loss_mask=mask,
        kept_mask=mask,
        policy_mask=mask,
        ages=version - trajectory.weight_versions[last],
        advantages=np.zeros(len(mask), dtype=np.float32),
        reward=reward,
        metadata=group.prompt.metadata,
        is_truncated=trajectory.is_truncated,
        turn_rewards=tuple(sum(turn.rewards.values()) for turn in trajectory.response.turns),
        reference_logprobs=None if references is None else references[sibling][last],
    )


def totals(items: Sequence[LearnerItem]) -> Totals:
    """The denominators of a minibatch."""
    trained = [item.num_trained for item in items]
    return Totals(num_tokens=sum(trained), num_sequences=sum(n > 0 for n in trained))


def tokens_by_age(items: Sequence[LearnerItem]) -> tuple[int, int]:
    """Numbers of trained tokens of a minibatch: of the current weights, and of older weights."""
    num_older = sum(item.num_older(0) for item in items)
    return sum(item.num_trained for item in items) - num_older, num_older


def minibatches_of(
    groups: list[list[LearnerItem]], algorithm: AlgorithmConfig, seed: Sequence[int]
) -> list[list[LearnerItem]]:
    """The minibatches of all epochs, one optimizer step each; those without a loss are left out.

    An epoch has all groups, in parts of nearly equal size: the first in their order, the others shuffled by `seed`.
    """
    rng, num = np.random.default_rng(seed), len(groups)
    orders = [np.arange(num), *(rng.permutation(num) for _ in range(algorithm.num_epochs - 1))]
    parts = [part for order in orders for part in np.array_split(order, algorithm.num_minibatches)]
    filled = [[item for n in part for item in groups[n]] for part in parts]
    return [part for part in filled if any(item.kept_mask.any() for item in part)]


def without_overlong(groups: list[list[LearnerItem]], algorithm: AlgorithmConfig) -> list[list[LearnerItem]]:
    """Removes the loss of responses excluded by `algorithm.overlong_filter`."""
    if not algorithm.overlong_filter:
        return groups
    return [[item.without_loss() if item.is_truncated else item for item in group] for group in groups]


def select_by_entropy(items: list[LearnerItem], top_share: float) -> list[LearnerItem]:
    """Policy loss on the `top_share` of the minibatch's kept tokens that have the highest entropy, at least one.

    Tokens of equal entropy stay together: siblings share the distribution of their first token, and rounding must not
    choose among them.

    Source: Beyond the 80/20 Rule, arXiv:2506.01939, equation 6.
    """
    if top_share == 1:
        return items
    entropies = np.concatenate([filled(item.entropies)[item.kept_mask] for item in items])
    num = max(1, int(np.ceil(top_share * len(entropies))))
    least = np.partition(entropies, len(entropies) - num)[len(entropies) - num]
    return [
        replace(item, policy_mask=item.kept_mask & (filled(item.entropies) >= least - SAME_ENTROPY)) for item in items
    ]


def filled(column: np.ndarray | None) -> np.ndarray:
    """Returns a column of an item filled by an earlier pass."""
    assert column is not None, "the pass that fills this column has not run"
    return column


def collate_items(items: Sequence[LearnerItem], reader: MediaReader, device: torch.device) -> LearnerBatch:
    references = [item.reference_logprobs for item in items if item.reference_logprobs is not None]
    old = [item.old_logprobs for item in items if item.old_logprobs is not None]
    return LearnerBatch(
        inputs=collate_rows([item.sequence for item in items], reader, device),
        behavior_logprobs=column([item.behavior_logprobs for item in items], np.float32, device),
        loss_mask=column([item.loss_mask for item in items], np.bool_, device),
        kept_mask=column([item.kept_mask for item in items], np.bool_, device),
        policy_mask=column([item.policy_mask for item in items], np.bool_, device),
        ages=column([item.ages for item in items], np.int32, device),
        advantages=column([item.advantages for item in items], np.float32, device),
        old_logprobs=column(old, np.float32, device) if len(old) == len(items) else None,
        reference_logprobs=column(references, np.float32, device) if len(references) == len(items) else None,
    )
