"""From scored groups to what one backward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cluster.media import MediaReader
from cluster.objects import fetch_or_miss
from cluster.trajectory import ScoredGroup, TrajectoryGroup
from learner.algorithms.advantages import AdvantageFunction
from learner.algorithms.aggregation import Totals
from learner.policies.batch import TokenBatch, TokenSequence, collate, pad_rows


@dataclass(frozen=True)
class LearnerItem:
    """One trajectory as the learner sees it. A truncated response ends in its last sampled token, never in an EOS."""

    sequence: TokenSequence
    behavior_logprobs: np.ndarray  # float32 [T]
    loss_mask: np.ndarray  # bool [T]: True where a token is trained
    ages: np.ndarray  # int32 [T], versions: the one trained from less the one that sampled a token
    advantage: float
    reference_logprobs: np.ndarray | None  # float32 [T]

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())

    def num_older(self, age: int) -> int:
        """How many of the trained tokens are older."""
        return int((self.loss_mask & (self.ages > age)).sum())

    def untrained(self) -> LearnerItem:
        """The same row with no token to learn from."""
        return replace(self, loss_mask=np.zeros_like(self.loss_mask))


@dataclass(frozen=True)
class TokensByAge:
    """Trained tokens of a minibatch: of the weights that are trained from, and of older ones."""

    num_current: int
    num_older: int


@dataclass(frozen=True)
class LearnerBatch:
    """Padded columns of a micro-batch; padding is 0 and False."""

    tokens: TokenBatch
    behavior_logprobs: Tensor  # float32 [B, T]
    loss_mask: Tensor  # bool [B, T]
    ages: Tensor  # int32 [B, T]
    advantages: Tensor  # float32 [B, 1]
    reference_logprobs: Tensor | None  # float32 [B, T]


def fetch_items(
    groups: Sequence[ScoredGroup], advantage: AdvantageFunction, version: int, timeout_s: float
) -> list[list[LearnerItem]]:
    """The trajectories of each group with their advantages, and with the ages that their tokens have for the step that
    trains from `version`; media stay where they are.

    A trajectory without a reward (None) is left out of its group's statistics and is not trained.
    """
    fetched: list[TrajectoryGroup] = fetch_or_miss([g.group for g in groups], timeout_s=timeout_s, what="groups")
    references = fetch_or_miss([g.reference_logprobs for g in groups], timeout_s=timeout_s, what="reference log-probs")
    advantages = iter(_advantages(groups, advantage))
    return [
        [
            LearnerItem(
                sequence=TokenSequence.of_response(group.prompt, trajectory.actions.token_ids),
                behavior_logprobs=trajectory.behavior_logprobs,
                loss_mask=trajectory.action_mask & (reward is not None),
                ages=version - trajectory.weight_versions,
                advantage=next(advantages),
                reference_logprobs=None if reference is None else reference[i],
            )
            for i, (trajectory, reward) in enumerate(zip(group.trajectories, scored.rewards, strict=True))
        ]
        for group, scored, reference in zip(fetched, groups, references, strict=True)
    ]


def totals(items: Sequence[LearnerItem]) -> Totals:
    """The denominators of a minibatch."""
    trained = [item.num_trained for item in items]
    return Totals(num_tokens=sum(trained), num_sequences=sum(n > 0 for n in trained))


def tokens_by_age(items: Sequence[LearnerItem]) -> TokensByAge:
    """How many trained tokens of a minibatch are current and how many are older."""
    num_older = sum(item.num_older(0) for item in items)
    return TokensByAge(sum(item.num_trained for item in items) - num_older, num_older)


def minibatches(groups: list[list[LearnerItem]], num_minibatches: int) -> list[list[LearnerItem]]:
    """Whole groups in `num_minibatches` parts of nearly equal number of groups."""
    return [
        [item for n in part for item in groups[n]] for part in np.array_split(np.arange(len(groups)), num_minibatches)
    ]


def collate_items(items: Sequence[LearnerItem], reader: MediaReader, device: torch.device) -> LearnerBatch:
    """Pad trajectories into one micro-batch."""
    references = [item.reference_logprobs for item in items if item.reference_logprobs is not None]
    return LearnerBatch(
        tokens=collate([item.sequence for item in items], reader, device),
        behavior_logprobs=_column([item.behavior_logprobs for item in items], np.float32, device),
        loss_mask=_column([item.loss_mask for item in items], np.bool_, device),
        ages=_column([item.ages for item in items], np.int32, device),
        advantages=torch.tensor([[item.advantage] for item in items], dtype=torch.float32, device=device),
        reference_logprobs=_column(references, np.float32, device) if len(references) == len(items) else None,
    )


def _advantages(groups: Sequence[ScoredGroup], advantage: AdvantageFunction) -> list[float]:
    rewards = [(n, reward) for n, group in enumerate(groups) for reward in group.rewards]
    ids = {group.summary.group_id: n for n, group in enumerate(groups)}
    return advantage(
        torch.tensor([0.0 if reward is None else reward.value for _, reward in rewards]),
        torch.tensor([reward is not None for _, reward in rewards]),
        torch.tensor([ids[groups[n].summary.group_id] for n, _ in rewards]),
    ).tolist()


def _column(rows: Sequence[np.ndarray], dtype: type, device: torch.device) -> Tensor:
    return torch.from_numpy(pad_rows(rows, 0, dtype)).to(device)
