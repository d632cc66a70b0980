"""StepLearner: the learner that the loop calls. It makes each step durable and replaces lost groups."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from mobula.cluster.errors import JournalError, LostObjectError, MobulaError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.checkpoints import Durable
from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.cluster.roles import Learner, UpdateReport
from mobula.cluster.rollout.dispatcher import MAX_NODES_LOST
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer, Stage

_logger = logging.getLogger(__name__)

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
        """Waits until at most `num_left` steps are unwritten."""
        while len(self._waiting) > num_left:
            version, writing = self._waiting.popleft()
            try:
                await writing
            except (OSError, MobulaError, pa.ArrowException) as error:
                _logger.warning("step %d is missing in the trajectory log: %s", version, error)
                self.on_log_failed(type(error).__name__)
