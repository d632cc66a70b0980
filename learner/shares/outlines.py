"""Outlines: the parts of a trajectory that every rank knows, also of trajectories that other ranks fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.batch import LearnerItem
from mobula.learner.policies.base import NO_TOKENS, RowOutline

NOTHING = np.empty(0, dtype=np.float32)
NO_MASK = np.empty(0, dtype=np.bool_)
UNKNOWN = ""  # what a summary has no room for


@dataclass(frozen=True)
class ItemOutline:
    """A LearnerItem on its way to the other ranks: a bit and a few numbers a token, or 8 bytes more where credit reads
    log-probs. Rewards, masks, ages and sizes arrive; token ids, latents and media do not.
    """

    item: LearnerItem  # without what follows
    mask: bytes  # the bits of `loss_mask`
    ages: tuple[np.ndarray, np.ndarray]  # int32: an age, and for how many steps in a row it holds

    @classmethod
    def of(cls, item: LearnerItem, config: RunConfig) -> ItemOutline:
        """Of a fresh item, all of whose masks are equal and whose advantages are 0."""
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
        """The item as `Credit`, totals and the sharing out of rows read it."""
        num = self.item.sequence.num_targets
        mask = np.unpackbits(np.frombuffer(self.mask, dtype=np.uint8), count=num).astype(np.bool_)
        advantages = np.zeros(num, dtype=np.float32)
        ages = np.repeat(*self.ages)
        return replace(self.item, loss_mask=mask, kept_mask=mask, policy_mask=mask, ages=ages, advantages=advantages)


def planned_items(groups: Sequence[ScoredGroup]) -> list[list[LearnerItem]]:
    """The items that summaries let expect, sufficient to assign them to ranks: all sampled, none too long, without
    media of later turns."""
    planned: list[list[LearnerItem]] = []
    index = 0
    for place, scored in enumerate(groups):
        row = [
            _planned(scored, index + n, place, num_steps, is_scored=reward is not None)
            for n, (num_steps, reward) in enumerate(zip(scored.summary.num_steps, scored.rewards, strict=True))
        ]
        planned.append(row)
        index += len(row)
    return planned


def _planned(scored: ScoredGroup, index: int, place: int, num_steps: int, *, is_scored: bool) -> LearnerItem:
    summary = scored.summary
    media = tuple(MediaHandle(key, UNKNOWN, 0, None) for key in summary.media_keys)
    mask = np.full(num_steps, is_scored)
    return LearnerItem(
        index=index,
        group=place,
        sample_id=UNKNOWN,
        sequence=RowOutline(num_steps, summary.num_prompt_tokens + num_steps, summary.num_media_tokens, media),
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
    """Values and how often in a row each is there."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[starts], np.diff(starts, append=len(values))
