"""Regenerates finished groups that were lost with their node, from the journal or by sampling again.

Until the journal has fetched a finished group, only the node of its rollout actor stores it. A missing group of a
new step is taken from the journal, or sampled and scored again if the journal does not have it. The groups of a trained
step come from the journal only: new samples would give other weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from mobula.cluster.errors import LostObjectError
from mobula.cluster.records.arrow import RecordedGroup
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.roles import Reference
from mobula.cluster.rollout.dispatcher import MAX_NODES_LOST
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.object_store import fetch_or_miss

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class GroupRegenerator:
    """Replaces the lost groups of a step and keeps the others."""

    replay: ReplayBuffer
    groups: LiveGroups
    sample_again: Callable[[str], Awaitable[ScoredGroup]]  # (prompt id): returns a scored group
    _: KW_ONLY
    timeout_s: float  # of the check of one group
    on_lost: Callable[[str], None]  # called for each group that is sampled again
    # gets each new group and its source: `journal` or `sampled`
    on_replaced: Callable[[ScoredGroup, str], None] = lambda group, source: None

    async def regenerate(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Returns the groups of a step that is not trained yet, in order. Regenerated groups, and groups that lost only
        their reference log-probs, have no reference log-probs."""
        lost = [group for group in groups if await self._is_lost(group.group)]
        recorded = await self.replay.recall(_ids(lost)) if lost else {}
        new = {group.summary.group_id: group for group in await run_all(*(self._replace(g, recorded) for g in lost))}
        whole = [new.get(group.summary.group_id, group) for group in groups]
        return [replace(g, reference_logprobs=None) if await self._is_lost(g.reference_logprobs) else g for g in whole]

    async def recall(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Reads the groups of a trained step from the journal, with their log-probs."""
        recorded = await self.replay.recall(_ids(groups))
        missing = [group_id for group_id in _ids(groups) if group_id not in recorded]
        if missing:
            raise LostObjectError(
                f"groups {', '.join(missing)} were trained and then lost with their node, and no journal has them: "
                "go on with resume=auto, and set replay.journal=true"
            )
        return [await asyncio.to_thread(self.groups.revive, recorded[group_id]) for group_id in _ids(groups)]

    async def _replace(self, lost: ScoredGroup, recorded: Mapping[str, RecordedGroup]) -> ScoredGroup:
        group_id = lost.summary.group_id
        is_recorded = group_id in recorded and recorded[group_id].has_all_media
        if is_recorded:
            # Without log-probs: the journal has log-probs of trained steps only, and this step is scored again.
            bare = replace(recorded[group_id], reference_logprobs=None)
            group = await asyncio.to_thread(self.groups.revive, bare)
        else:
            _logger.warning("group %s was lost with its node and is sampled again", group_id)
            self.on_lost(LostObjectError.__name__)
            group = await self.sample_again(group_id)
        await self.replay.exchange(group)
        self.on_replaced(group, "journal" if is_recorded else "sampled")
        return group

    async def _is_lost(self, reference: Any) -> bool:
        try:
            await asyncio.to_thread(fetch_or_miss, [reference], timeout_s=self.timeout_s, what="a group of a step")
        except LostObjectError:
            return True
        return False


class RegeneratingReference:
    """A reference that regenerates lost groups and scores the step again."""

    def __init__(self, reference: Reference, regenerator: GroupRegenerator) -> None:
        self._reference = reference
        self._regenerator = regenerator

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Raises: LostObjectError: groups were lost more than `MAX_NODES_LOST` times."""
        for _ in range(MAX_NODES_LOST):
            try:
                return await self._reference.score(groups)
            except LostObjectError as error:
                _logger.warning("groups of a step are regenerated before it is scored: %s", error)
                groups = await self._regenerator.regenerate(groups)
        return await self._reference.score(groups)

    async def regenerate(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Returns the groups of a scored step, in order; lost groups are replaced and lost log-probs recomputed."""
        whole = await self._regenerator.regenerate(groups)
        unscored = [
            new
            for new, old in zip(whole, groups, strict=True)
            if new.reference_logprobs is None and old.reference_logprobs is not None
        ]
        if not unscored:
            return whole
        scored = {group.summary.group_id: group for group in await self.score(unscored)}
        return [scored.get(group.summary.group_id, group) for group in whole]


def _ids(groups: Sequence[ScoredGroup]) -> list[str]:
    return [group.summary.group_id for group in groups]
