"""LiveGroups: restores recorded groups for training, with the images of their prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mobula.cluster.errors import ChangedDataError
from mobula.cluster.records.arrow import RecordedGroup
from mobula.cluster.records.trajectory import Prompt, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import Prompts


class LiveGroups:
    """Records hold no images, so each prompt is rebuilt from its id. The rebuilt prompt must equal the recorded one."""

    def __init__(self, prompts: Prompts, put: Callable[[Any], Any]) -> None:
        """`put` stores a value and returns a reference for `mobula.cluster.runtime.object_store.fetch`."""
        self._prompts = prompts
        self._put = put

    def revive(self, recorded: RecordedGroup) -> ScoredGroup:
        """Returns the group as it was before it was recorded.

        Raises:
            SkippedSample: the row is unusable now, or gives another prompt (`ChangedDataError`).
            DatasetError: the sequence has another id at the prompt's position.
        """
        group = recorded.group
        if not recorded.has_all_media:
            raise ChangedDataError(
                f"group {group.group_id} has images of later turns that its record does not hold: it can only "
                "be sampled again"
            )
        prompt = self._prompts.prompt_at(self._prompts.index_of(group.group_id))
        _refuse_if_changed(prompt, group.prompt)
        live = TrajectoryGroup(prompt, group.trajectories)
        logprobs = recorded.reference_logprobs
        return ScoredGroup(
            summary=live.summary(),
            group=self._put(live),
            rewards=recorded.rewards,
            reference_logprobs=None if logprobs is None else self._put(list(logprobs)),
        )


def _refuse_if_changed(now: Prompt, then: Prompt) -> None:
    is_equal = {
        "tokens": np.array_equal(now.expanded_ids, then.expanded_ids)
        and np.array_equal(now.compact_ids, then.compact_ids),
        "images": now.media == then.media and now.media_spans == then.media_spans,
    }
    changed = [name for name, equal in is_equal.items() if not equal]
    if changed:
        raise ChangedDataError(
            f"prompt {then.prompt_id} has other {' and '.join(changed)} than when it was sampled: "
            f"restore the row {then.sample_id} and its images, or the data.* keys, as they were"
        )
