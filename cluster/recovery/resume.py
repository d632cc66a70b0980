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
from pathlib import Path
from typing import Any

from mobula.cluster.errors import JournalError, SkippedSample
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal, Recovered, TrainedStep
from mobula.cluster.roles import ReplayStats, UpdateReport
from mobula.cluster.rollout.dispatcher import OVER_AGE, RolloutDispatcher
from mobula.cluster.rollout.staleness import AgeLimit

_logger = logging.getLogger(__name__)

AfterRepeat = Callable[[Sequence[ScoredGroup], UpdateReport], Awaitable[UpdateReport]]
"""Takes the groups of a step and its report; returns the report with more metrics."""
NEWER = "newer"
TORN = "torn"
NO_STATS = ReplayStats(num_ready=0, num_taken=0, num_bytes=0, oldest_age_s=0.0)


class JournalRecovery:
    """Brings learner, dispatcher and replay buffer from a checkpoint to the end of the journal."""

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
        recovered: Callable[[int], Recovered] | None = None,
        on_evaluated: Callable[[int, Mapping[str, Any]], None] = lambda version, evaluation: None,
        after_repeat: AfterRepeat | None = None,
    ) -> None:
        """`recovered` returns the part of the journal after the checkpoint of a version; all by default. `metrics`
        may lack some of the repeated steps. `on_recovered` gets the number of recovered steps and groups, and the
        number of lost groups by reason; `on_evaluated` gets each evaluation of the journal before the steps that
        followed it. `after_repeat` is awaited after each repeated step."""
        self._journal = journal
        self._recovered = recovered or journal.recover
        self._on_evaluated = on_evaluated
        self._learner = learner
        self._groups = groups
        self._dispatcher = dispatcher
        self._replay = replay
        self._metrics = metrics
        self._age_limit = age_limit
        self._on_recovered = on_recovered
        self._after_repeat = after_repeat

    async def begin(self) -> None:
        """Called at the start of a new run: invalidates the records that an earlier run left in the journal."""
        await self._replay.resume(0, ())

    async def recover(self, version: int) -> int:
        """Repeats the journal's steps after the checkpoint of `version`, from which learner and dispatcher were
        restored. Returns the version reached."""
        recovered = await asyncio.to_thread(self._recovered, version)
        # In this order: the dispatcher needs the version that the learner reached, the buffer needs both.
        for step in recovered.steps:
            self._evaluate(recovered, step.version - 1)
            await self._repeat(step)
        self._evaluate(recovered, recovered.reached)
        self._dispatcher.show(recovered.arrivals)
        lost: Counter[str] = Counter({TORN: recovered.num_torn} if recovered.num_torn else {})
        finished = await asyncio.to_thread(self._revived, recovered, lost)
        trained = (group_id for step in recovered.steps for group_id in step.group_ids)
        self._dispatcher.catch_up(
            recovered.reached, [*trained, *filter(self._dispatcher.is_open, recovered.rejected)], finished
        )
        await self._replay.resume(recovered.reached, [group.summary.group_id for group in finished])
        _logger.info(
            "recovered from version %d to %d by the journal; finished groups recovered: %d, %s",
            version,
            recovered.reached,
            len(finished),
            f"lost: {dict(lost)}" if lost else "none was lost",
        )
        self._on_recovered({"steps": len(recovered.steps), "groups": len(finished), **lost})
        return recovered.reached

    async def saved(self, version: int) -> None:
        """Called when the checkpoint of `version` is complete."""
        await self._replay.forget(version)

    def _evaluate(self, recovered: Recovered, version: int) -> None:
        if version in recovered.evaluations:
            self._on_evaluated(version, recovered.evaluations[version])

    async def _repeat(self, step: TrainedStep) -> None:
        closed = [group_id for group_id in step.group_ids if not self._dispatcher.is_open(group_id)]
        if closed:
            raise self._unfit(
                step, f"according to the checkpoint {', '.join(closed)} was trained or rejected before it"
            )
        try:
            groups = await asyncio.to_thread(lambda: [self._groups.revive(recorded) for recorded in step.read()])
        except SkippedSample as error:
            raise self._unfit(step, str(error)) from error
        self._dispatcher.show(step.arrivals)
        with self._metrics.step(step.version) as measured:
            measured.include(step.seconds)
            with measured.timed("update"):
                update = await self._learner.repeat(groups)
            assert update.version == step.version, f"step {step.version} of the journal made version {update.version}"
            if self._after_repeat is not None:
                update = await self._after_repeat(groups, update)
            self._dispatcher.advanced()
            measured.record(groups, update, NO_STATS)

    def _unfit(self, step: TrainedStep, reason: str) -> JournalError:
        return JournalError(
            f"step {step.version} of the journal cannot be repeated: {reason}; fix that, or remove "
            f"{self._journal.folder} to resume from the checkpoint and sample the later steps again"
        )

    def _revived(self, recovered: Recovered, lost: Counter[str]) -> list[ScoredGroup]:
        """Returns the finished groups that can still be trained. Counts the others in `lost`, to be sampled again."""
        groups: list[ScoredGroup] = []
        for candidate in recovered.finished:
            if not self._dispatcher.is_open(candidate.group_id):
                continue
            recorded = candidate.read()
            versions = recorded.group.summary().tokens_by_version
            if max(versions) > recovered.reached:
                lost[NEWER] += 1  # it was sampled with weights that are lost
            elif self._age_limit.drops(versions, recovered.reached):
                lost[OVER_AGE] += 1
            else:
                try:
                    groups.append(self._groups.revive(recorded))
                except SkippedSample as error:
                    _logger.warning("finished group %s is sampled again: %s", candidate.group_id, error)
                    lost[error.reason] += 1
        return groups


class NoRecovery:
    """Resumes from the checkpoint alone and removes the journal of an earlier part of the run.

    That journal would no longer match the run's later steps.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the journal's folder. It may be missing."""
        self._folder = folder

    async def begin(self) -> None:
        await asyncio.to_thread(self._remove)

    async def recover(self, version: int) -> int:
        await asyncio.to_thread(self._remove)
        return version

    async def saved(self, version: int) -> None: ...

    def _remove(self) -> None:
        if self._folder.is_dir():
            _logger.warning("%s is removed: with replay.journal=false it would not match this run", self._folder)
            shutil.rmtree(self._folder)
