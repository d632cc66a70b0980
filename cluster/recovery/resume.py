"""Recovery from the newest checkpoint to the last step of the journal.

An update is a function of the learner's state and the groups, so repeating the steps of the journal gives the same
weights: bit for bit on the same ranks and CPU threads, within the determinism of the kernels on a GPU. Finished groups
that were not trained yet go back into the dispatcher and are not sampled again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from mobula.cluster.errors import JournalError, SkippedSample
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.checkpoints import Recovery
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal, Recovered, TrainedStep
from mobula.cluster.roles import ReplayStats, UpdateReport
from mobula.cluster.rollout.dispatcher import OVER_AGE, RolloutDispatcher
from mobula.cluster.rollout.staleness import AgeLimit

_logger = logging.getLogger(__name__)

# Takes the groups of a step and its report; returns the report with more metrics
AfterRepeat = Callable[[Sequence[ScoredGroup], UpdateReport], Awaitable[UpdateReport]]
NEWER = "newer"
TORN = "torn"


@dataclass(eq=False)
class JournalRecovery(Recovery):
    """Brings learner, dispatcher and replay buffer from a checkpoint to the end of the journal."""

    journal: Journal
    _: KW_ONLY
    learner: StepLearner
    groups: LiveGroups
    dispatcher: RolloutDispatcher
    replay: ReplayBuffer
    metrics: Metrics  # may lack some of the repeated steps
    age_limit: AgeLimit
    # gets the number of recovered steps and groups, and of lost groups by reason
    on_recovered: Callable[[Mapping[str, int]], None]
    # returns the part of the journal after the checkpoint of a version; None: all
    recovered: Callable[[int], Recovered] | None = None
    # gets each evaluation of the journal before the steps that followed it
    on_evaluated: Callable[[int, Mapping[str, Any]], None] = lambda version, evaluation: None
    after_repeat: AfterRepeat | None = None  # awaited after each repeated step

    def __post_init__(self) -> None:
        self._recovered = self.recovered or self.journal.recover

    async def begin(self) -> None:
        """Invalidates the records that an earlier run left in the journal."""
        await self.replay.journal.resumed(0, ())

    async def recover(self, version: int) -> int:
        recovered = await asyncio.to_thread(self._recovered, version)
        # In this order: the dispatcher needs the version that the learner reached, the buffer needs both.
        for step in recovered.steps:
            self._evaluate(recovered, step.version - 1)
            await self._repeat(step)
        self._evaluate(recovered, recovered.reached)
        self.dispatcher.show(recovered.arrivals)
        lost: Counter[str] = Counter({TORN: recovered.num_torn} if recovered.num_torn else {})
        finished = await asyncio.to_thread(self._revived, recovered, lost)
        trained = (group_id for step in recovered.steps for group_id in step.group_ids)
        self.dispatcher.catch_up(
            recovered.reached, [*trained, *filter(self.dispatcher.is_open, recovered.rejected)], finished
        )
        await self.replay.journal.resumed(recovered.reached, [group.summary.group_id for group in finished])
        if recovered.reached > version or finished or lost:
            _logger.info(
                "recovered from version %d to %d by the journal; finished groups recovered: %d, %s",
                version,
                recovered.reached,
                len(finished),
                f"lost: {dict(lost)}" if lost else "none was lost",
            )
        self.on_recovered({"steps": len(recovered.steps), "groups": len(finished), **lost})
        return recovered.reached

    async def saved(self, version: int) -> None:
        await self.replay.journal.forget(version)

    def _evaluate(self, recovered: Recovered, version: int) -> None:
        if version in recovered.evaluations:
            self.on_evaluated(version, recovered.evaluations[version])

    async def _repeat(self, step: TrainedStep) -> None:
        closed = [group_id for group_id in step.group_ids if not self.dispatcher.is_open(group_id)]
        if closed:
            raise self._unfit(
                step, f"according to the checkpoint {', '.join(closed)} was trained or rejected before it"
            )
        try:
            groups = await asyncio.to_thread(lambda: [self.groups.revive(recorded) for recorded in step.read()])
        except SkippedSample as error:
            raise self._unfit(step, str(error)) from error
        self.dispatcher.show(step.arrivals)
        with self.metrics.step(step.version) as measured:
            measured.include(step.seconds)
            with measured.timed("update"):
                update = await self.learner.repeat(groups)
            assert update.version == step.version, f"step {step.version} of the journal made version {update.version}"
            if self.after_repeat is not None:
                update = await self.after_repeat(groups, update)
            self.dispatcher.advanced()
            measured.record(groups, update, ReplayStats())

    def _unfit(self, step: TrainedStep, reason: str) -> JournalError:
        return JournalError(
            f"step {step.version} of the journal cannot be repeated: {reason}; fix that, or remove "
            f"{self.journal.folder} to resume from the checkpoint and sample the later steps again"
        )

    def _revived(self, recovered: Recovered, lost: Counter[str]) -> list[ScoredGroup]:
        """Returns the finished groups that can still be trained. Counts the others in `lost`, to be sampled again."""
        groups: list[ScoredGroup] = []
        for candidate in recovered.finished:
            if not self.dispatcher.is_open(candidate.group_id):
                continue
            recorded = candidate.group()
            versions = recorded.group.summary().tokens_by_version
            if max(versions) > recovered.reached:
                lost[NEWER] += 1  # it was sampled with weights that are lost
            elif self.age_limit.drops(versions, recovered.reached):
                lost[OVER_AGE] += 1
            else:
                try:
                    groups.append(self.groups.revive(recorded))
                except SkippedSample as error:
                    _logger.warning("finished group %s is sampled again: %s", candidate.group_id, error)
                    lost[error.reason] += 1
        return groups


class NoRecovery(Recovery):
    """Resumes from the checkpoint alone and removes the journal of an earlier part of the run. That journal would no
    longer match the run's later steps."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the journal's folder. It may be missing."""
        self._folder = folder

    async def begin(self) -> None:
        await asyncio.to_thread(self._remove)

    async def recover(self, version: int) -> int:
        await asyncio.to_thread(self._remove)
        return version

    def _remove(self) -> None:
        if self._folder.is_dir():
            _logger.warning("%s is removed: with replay.journal=false it would not match this run", self._folder)
            shutil.rmtree(self._folder)
