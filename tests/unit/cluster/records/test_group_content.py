"""The digest of a group: equal wherever the group goes, other after any change of what an update reads."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fakes import make_group
from group_data import image_prompt

from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.arrow import from_batch, to_batch
from mobula.cluster.records.trajectory import (
    FinishReason,
    MediaSpan,
    Reward,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
    group_digest,
)

GROUP = make_group(image_prompt())
Change = Callable[[Trajectory], Trajectory]


def changed(change: Change) -> TrajectoryGroup:
    first, *others = GROUP.trajectories
    return replace(GROUP, trajectories=(change(first), *others))


def test_a_group_keeps_its_digest_in_messages_and_in_the_journal() -> None:
    rewards = [Reward(1.0)] * len(GROUP.trajectories)
    assert GROUP.summary().sha256 == group_digest(GROUP)
    assert group_digest(pickle.loads(pickle.dumps(GROUP))) == group_digest(GROUP)
    assert group_digest(from_batch(to_batch(GROUP, rewards)).group) == group_digest(GROUP)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: replace(t, actions=TokenActions(t.actions.token_ids + 1)),
        lambda t: replace(t, actions=TokenActions(t.actions.token_ids, KeptSets.uncut(t.num_steps))),
        lambda t: replace(t, behavior_logprobs=np.nextafter(t.behavior_logprobs, np.float32(1))),
        lambda t: replace(t, action_mask=~t.action_mask),
        lambda t: replace(t, weight_spans=(WeightSpan(9, 0, t.num_steps),)),
        lambda t: replace(t, finish_reason=FinishReason.ABORT),
    ],
    ids=["tokens", "kept sets", "log-probs", "mask", "versions", "reason"],
)
def test_every_field_that_is_trained_counts(change: Change) -> None:
    assert group_digest(changed(change)) != group_digest(GROUP)


@pytest.mark.parametrize(
    "fields",
    [
        {"expanded_ids": np.array([5, 98, 99, 6], dtype=np.int32)},
        {"prompt_id": "0/4"},
        {"media_spans": (MediaSpan(0, 2),)},
    ],
    ids=["prompt", "id", "place of the image"],
)
def test_the_prompt_counts(fields: dict[str, object]) -> None:
    assert group_digest(replace(GROUP, prompt=replace(GROUP.prompt, **fields))) != group_digest(GROUP)
