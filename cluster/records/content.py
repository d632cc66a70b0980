"""Digest of a trajectory group: sha256 of everything that an update reads of it, apart from rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mobula.cluster.records.media import MediaHandle, MediaSpan

if TYPE_CHECKING:
    from mobula.cluster.records.trajectory import Trajectory, TrajectoryGroup


def group_digest(group: TrajectoryGroup) -> str:
    """Returns the sha256 of prompt tokens, media keys, actions, behaviour log-probs, masks and weight versions.

    The group gives the same digest after it was written to the journal or the trajectory log and read again.
    """
    prompt = group.prompt
    media = _places(prompt.media, prompt.media_spans)
    digest = hashlib.sha256(repr((group.group_id, media)).encode())
    for ids in (prompt.compact_ids, prompt.expanded_ids):
        digest.update(_bytes(ids, np.int32))
    for trajectory in group.trajectories:
        digest.update(_outline(trajectory))
        for part in trajectory.actions.content():
            digest.update(np.ascontiguousarray(part).data)
        digest.update(_bytes(trajectory.behavior_logprobs, np.float32))
        digest.update(_bytes(trajectory.action_mask, np.bool_))
    return digest.hexdigest()


def _outline(trajectory: Trajectory) -> bytes:
    """Returns the fields that are not arrays, and the lengths that separate the arrays."""
    spans = [(int(span.version), int(span.start), int(span.end)) for span in trajectory.weight_spans]
    shown = _places(trajectory.actions.media, trajectory.actions.media_spans)
    reason = trajectory.finish_reason.value
    return repr((trajectory.trajectory_id, trajectory.num_steps, spans, shown, reason)).encode()


def _places(media: Sequence[MediaHandle], spans: Sequence[MediaSpan]) -> tuple[list[str], list[tuple[int, int]]]:
    return [medium.key for medium in media], [(int(span.start), int(span.end)) for span in spans]


def _bytes(array: np.ndarray, dtype: type[np.generic]) -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).data
