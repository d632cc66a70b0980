"""Recovery: from the newest checkpoint to where the run was, by its journal.

An update is a function of the learner's state and of the groups, so the steps that the journal holds are taken again
and the weights come out as they were: bit for bit on the same ranks and threads of a CPU, within what its kernels
promise on a GPU. Finished groups that were not trained yet go back into the dispatcher instead of being sampled again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from mobula.cluster.errors import JournalError, SkippedSample
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.replay.journal import Journal, Recovered, TrainedStep
from mobula.cluster.replay.live_groups import LiveGroups
from mobula.cluster.roles import ReplayStats
from mobula.cluster.rollout.dispatcher import OVER_AGE, RolloutDispatcher
from mobula.cluster.rollout.staleness import AgeLimit

_logger = logging.getLogger(__name__)

NEWER = "newer"
TORN = "torn"
NO_STATS = ReplayStats(num_ready=0, num_taken=0, num_bytes=0, oldest_age_s=0.0)


class JournalRecovery:
    """Brings learner, dispatcher and buffer of a run from a checkpoint to where its journal ends."""

    def __init__(
        self,
        journal: Journal,
        *,
        learner: StepLearner,
        groups: LiveGroups,
        dispatcher: RolloutDispatcher,
        replay: ReplayBuffer,
        metrics: Metrics,
        age_limit: AgeLimit,
        on_recovered: Callable[[Mapping[str, int]], None],
    ) -> None:
        """`metrics` may lack some of the steps that are repeated. `on_recovered` is called with the number of steps and
        groups that came back, and with the number of lost groups by reason.
        """
        self._journal = journal
        self._learner = learner
        self._groups = groups
        self._dispatcher = dispatcher
        self._replay = replay
        self._metrics = metrics
        self._age_limit = age_limit
        self._on_recovered = on_recovered

    async def begin(self) -> None:
        """A new run begins: records that an earlier run left in the journal become void."""
        await self._replay.resume(0, ())

    async def recover(self, version: int) -> int:
        """Go on from the checkpoint of `version`, which learner and dispatcher were restored from; returns the version
        reached.

        Raises:
            JournalError: a step cannot be taken again: its data have changed, or the checkpoint says that it was.
        """
        found = await asyncio.to_thread(self._journal.recover, version)
        # Learner, dispatcher and buffer in this order: each takes up what the one before has settled.
        for step in found.steps:
            await self._repeat(step)
        lost: Counter[str] = Counter({TORN: found.num_torn} if found.num_torn else {})
        finished = await asyncio.to_thread(self._revived, found, lost)
        trained = (group_id for step in found.steps for group_id in step.group_ids)
        self._dispatcher.catch_up(
            found.reached, [*trained, *filter(self._dispatcher.is_open, found.rejected)], finished
        )
        await self._replay.resume(found.reached, [group.summary.group_id for group in finished])
        _logger.info(
            "the journal led from version %d to %d; %d finished groups came back, %s",
            version,
            found.reached,
            len(finished),
            f"lost: {dict(lost)}" if lost else "none was lost",
        )
        self._on_recovered({"steps": len(found.steps), "groups": len(finished), **lost})
        return found.reached

    async def saved(self, version: int) -> None:
        """A checkpoint of `version` is complete."""
        await self._replay.forget(version)

    async def _repeat(self, step: TrainedStep) -> None:
        closed = [group_id for group_id in step.group_ids if not self._dispatcher.is_open(group_id)]
        if closed:
            raise self._unfit(
                step, f"the checkpoint says that {', '.join(closed)} was trained on or rejected before it"
            )
        try:
            groups = await asyncio.to_thread(lambda: [self._groups.revive(recorded) for recorded in step.read()])
        except SkippedSample as error:
            raise self._unfit(step, str(error)) from error
        with self._metrics.step(step.version) as measured:
            with measured.timed("update"):
                update = await self._learner.repeat(groups)
            assert update.version == step.version, f"step {step.version} of the journal made version {update.version}"
            measured.record(groups, update, NO_STATS)

    def _unfit(self, step: TrainedStep, reason: str) -> JournalError:
        return JournalError(
            f"step {step.version} of the journal cannot be taken again: {reason}; fix that, or remove "
            f"{self._journal.folder} to go on from the checkpoint and do later steps again"
        )

    def _revived(self, found: Recovered, lost: Counter[str]) -> list[ScoredGroup]:
        """The finished groups that can still be trained on; the others are counted by reason and sampled again."""
        groups: list[ScoredGroup] = []
        for candidate in found.finished:
            if not self._dispatcher.is_open(candidate.group_id):
                continue
            recorded = candidate.read()
            versions = recorded.group.summary().tokens_by_version
            if max(versions) > found.reached:
                lost[NEWER] += 1  # it was sampled with weights that are lost
            elif self._age_limit.drops(versions, found.reached):
                lost[OVER_AGE] += 1
            else:
                try:
                    groups.append(self._groups.revive(recorded))
                except SkippedSample as error:
                    _logger.warning("finished group %s is sampled again: %s", candidate.group_id, error)
                    lost[error.reason] += 1
        return groups


class NoRecovery:
    """A run without a journal goes on from its checkpoint; one that lies in its place would be of another past."""

    def __init__(self, folder: Path) -> None:
        """`folder` is where a journal would be."""
        self._folder = folder

    async def begin(self) -> None:
        await asyncio.to_thread(self._remove)

    async def recover(self, version: int) -> int:
        await asyncio.to_thread(self._remove)
        return version

    async def saved(self, version: int) -> None: ...

    def _remove(self) -> None:
        if self._folder.is_dir():
            _logger.warning("%s is removed: replay.journal=false, so this run will not be what it says", self._folder)
            shutil.rmtree(self._folder)
