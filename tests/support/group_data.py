"""A group with an image, and what it means that two groups are equal."""

from __future__ import annotations

import numpy as np

from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import MediaSpan, Prompt, TrajectoryGroup


def image_prompt() -> Prompt:
    """Prompt 0/3/row-3 with one image of two tokens."""
    return Prompt(
        prompt_id="0/3/row-3",
        sample_id="row-3",
        text="which digit?",
        compact_ids=np.array([5, 99, 6], dtype=np.int32),
        expanded_ids=np.array([5, 99, 99, 6], dtype=np.int32),
        media=(MediaHandle("k" * 64, "image", 1234, object(), "images/3.png"),),
        media_spans=(MediaSpan(1, 3),),
        references=("7", "seven"),
        metadata={"level": 2},
    )


def assert_equal(read: TrajectoryGroup, written: TrajectoryGroup) -> None:
    """Every field, and every array's type and values."""
    ours, theirs = read.prompt, written.prompt
    for name in ("prompt_id", "sample_id", "text", "media", "media_spans", "references", "metadata"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [m.source for m in ours.media] == [m.source for m in theirs.media]
    pairs = [(ours.compact_ids, theirs.compact_ids), (ours.expanded_ids, theirs.expanded_ids)]
    for a, b in zip(read.trajectories, written.trajectories, strict=True):
        for name in ("trajectory_id", "weight_spans", "finish_reason", "response"):
            assert getattr(a, name) == getattr(b, name), name
        pairs += [
            (a.actions.token_ids, b.actions.token_ids),
            (a.behavior_logprobs, b.behavior_logprobs),
            (a.action_mask, b.action_mask),
        ]
    for array, expected in pairs:
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
