"""StepLearner: makes each step durable, and replaces groups that were lost with their node.

Until the journal has fetched a finished group, only the node of its rollout actor stores it. A missing group of a
new step is taken from the journal, or sampled and scored again if the journal does not have it. The groups of a trained
step come from the journal only: new samples would give other weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from mobula.cluster.errors import JournalError, LostObjectError, MobulaError
from mobula.cluster.records.arrow import RecordedGroup
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.checkpoints import Durable
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.cluster.roles import Learner, Reference, UpdateReport
from mobula.cluster.rollout.dispatcher import MAX_NODES_LOST
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer, Stage

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


Regenerate = Callable[[Sequence[ScoredGroup]], Awaitable[Sequence[ScoredGroup]]]


class DurableLearner(Learner, Durable, Protocol):
    """The learner group."""


@dataclass(eq=False)
class StepLearner:
    """Implements `mobula.cluster.roles.Learner` and `Durable` around the learner group, which restarts lost ranks.

    The journal is written during the update, before the new version is returned, so no token is sampled with a version
    that the journal of a killed run lacks. The log is written after the update on a separate thread; with more than
    `max_waiting` unwritten steps the next update waits. A checkpoint contains no step that the log lacks. A step that
    the log cannot write is counted and does not end the run.
    """

    learner: DurableLearner
    _: KW_ONLY
    journal: ReplayBuffer | None = None  # writes the journal
    log: TrajectoryLog | None = None
    max_waiting: int = 1
    on_log_failed: Callable[[str], None] = lambda kind: None  # gets the type of each error of the log
    before: Sequence[Callable[[], Awaitable[None]]] = ()  # awaited before each update
    regenerate: Regenerate | None = None  # replaces the lost groups of a step; without it their loss ends the run
    check: Callable[[UpdateReport], None] = lambda report: None  # gets each report
    seconds: Callable[[], Mapping[str, float]] = lambda: {}  # returns the phases of the step so far
    tracer: RunTracer = UNTRACED

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-log")
        self._waiting: deque[tuple[int, asyncio.Future[Path]]] = deque()
        self._version = 0  # of the learner

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        """Trains on a new step. Lost groups are regenerated and the step is trained again. The caller's list keeps the
        lost groups, and the metrics of the step are computed from them."""
        for call in self.before:
            await call()
        with self.tracer.span([group.summary.group_id for group in groups], Stage.TRAINED) as attributes:
            for num_lost in range(MAX_NODES_LOST + 1):
                try:
                    report = await self._recorded(groups)
                    break
                except LostObjectError as error:  # the learner has not changed yet
                    if self.regenerate is None or num_lost == MAX_NODES_LOST:
                        raise
                    _logger.warning("groups of a step are regenerated before it is trained: %s", error)
                    groups = await self.regenerate(groups)
            attributes["version"] = report.version
        self.check(report)
        return report

    async def repeat(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        """Trains on a step that is already in the journal."""
        report = await self.learner.update(groups)
        self._version = report.version
        if self.log is not None:
            await self._flush(self.max_waiting - 1)
            writing = asyncio.get_running_loop().run_in_executor(self._thread, self.log.append, report.version, groups)
            self._waiting.append((report.version, writing))
        return report

    async def save(self, folder: Path) -> None:
        # A run that resumes from this checkpoint does not repeat the earlier steps, so it could not log them.
        await self._flush(0)
        await self.learner.save(folder)

    async def finish_save(self) -> bool:
        return await self.learner.finish_save()

    async def load(self, folder: Path) -> int:
        self._version = await self.learner.load(folder)
        return self._version

    async def _recorded(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        if self.journal is None:
            return await self.repeat(groups)
        version = self._version + 1
        # At the same time: the journal waits for the disk while the ranks compute.
        report, missed = await run_all(self.repeat(groups), self._commit(self.journal, version, groups))
        assert report.version == version, f"the learner made version {report.version} instead of {version}"
        # Regenerated groups would differ from the trained ones: try once more, or stop.
        if missed is not None and (again := await self._commit(self.journal, version, groups)) is not None:
            raise JournalError(
                f"version {version} was made from groups that the journal could not fetch: {again}; "
                "go on with resume=auto, which repeats the step"
            ) from again
        return report

    async def _commit(
        self, journal: ReplayBuffer, version: int, groups: Sequence[ScoredGroup]
    ) -> LostObjectError | None:
        """Writes a step. Returns the error of a group that the journal could not fetch: the learner may have it."""
        try:
            await journal.commit(version, groups, self.seconds())
        except LostObjectError as error:
            return error
        return None

    async def _flush(self, num_left: int) -> None:
        while len(self._waiting) > num_left:
            version, writing = self._waiting.popleft()
            try:
                await writing
            except (OSError, MobulaError, pa.ArrowException) as error:
                _logger.warning("step %d is missing in the trajectory log: %s", version, error)
                self.on_log_failed(type(error).__name__)
