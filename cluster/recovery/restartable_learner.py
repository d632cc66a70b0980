"""RestartableLearner: a learner group that is restarted from its newest checkpoint when a rank is lost.

The other ranks cannot continue without the state of the lost rank. So all ranks are restarted, load the newest complete
checkpoint and repeat the later steps with the same groups. An update is a function of state and groups, so this gives
the same weights. Then the failed call is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from mobula.cluster.errors import (
    CheckpointError,
    DeadlineError,
    LostObjectError,
    RestartLoopError,
    WeightSyncError,
    WorkerDiedError,
)
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.recovery.checkpoints import Durable
from mobula.cluster.roles import Learner, UpdateReport
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.interfaces import Sender
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.cluster.workers.colocation import MovableLearner
from mobula.cluster.workers.faults import report_loss
from mobula.cluster.workers.status import MAX_EQUAL, RepeatedCause, RestartBudget

_logger = logging.getLogger(__name__)

T = TypeVar("T")
LOST = (WorkerDiedError, DeadlineError)
Recall = Callable[[Sequence[ScoredGroup]], Awaitable[Sequence[ScoredGroup]]]


class NotRestartableError(WorkerDiedError):
    """The ranks cannot be restarted: there is no checkpoint."""


class Ranks(Learner, Sender, Durable, MovableLearner, Protocol):
    """The learner group."""

    version: int

    async def respawn(self) -> None:
        """Kills every rank and starts all of them again."""
        ...

    async def restore(self, folder: Path, version: int) -> None:
        """Loads the state in `folder`, which becomes `version`."""
        ...

    async def export(self, folder: Path) -> None: ...

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]: ...


class StepObserver(Protocol):
    """Gets the steps of a learner as they are trained."""

    def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Called when the ranks have trained `groups`, which makes `version`."""
        ...

    def repeated(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Called when restarted ranks have trained a step again."""
        ...

    def restored(self, version: int) -> None:
        """Called when restarted ranks have loaded the checkpoint of `version`."""
        ...


class RestartableLearner:
    """Implements `Ranks` around `ranks`, and restarts all of them when one is dead or does not answer.

    Every call is repeated until it is answered; each loss costs one restart of the budget. When a rank is lost, all
    calls in progress fail and are repeated. This includes a call whose answer has just arrived: its effect may be lost
    with the ranks. Transfer groups are lost too: a push in progress raises a WeightSyncError and is repeated in a new
    epoch. A loss before the first checkpoint ends the run.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        newest: Callable[[], tuple[int, Path] | None],
        budget: RestartBudget,
        on_lost: Callable[[str], None],
    ) -> None:
        """`newest()` returns version and learner folder of the newest complete checkpoint. `on_lost` gets the kind of
        each loss: `learner_died` or `learner_hung`."""
        self._ranks = ranks
        self._newest = newest
        self._budget = budget
        self._on_lost = on_lost
        self._losses = RepeatedCause()
        self._furthest = -1  # highest version made: losses with one cause at one version are a restart loop
        self._num_without_progress = 0  # restarts since the last completed step
        self._restarting = asyncio.Lock()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trained: list[tuple[int, Sequence[ScoredGroup]]] = []  # (version made, groups), since a checkpoint
        self._base: tuple[int, Path] | None = None  # version made by `restore`, and the state that it loaded
        self._generation = 0  # of ranks
        self._saved_by = 0  # generation of the ranks with the last copy
        self._opened: set[int] = set()  # transfer epochs of the current ranks
        self._recall: Recall | None = None
        self._observers: list[StepObserver] = []
        self.num_steps_repeated = 0

    @property
    def is_restarting(self) -> bool:
        """Whether all ranks are being restarted."""
        return self._restarting.locked()

    @property
    def num_restarts(self) -> int:
        return self._generation

    def lose(self, error: Exception) -> None:
        """Reports that a rank is dead or does not answer. Calls in progress fail now, before their deadline."""
        if not self._restarting.locked():  # starting ranks do not answer yet
            self._break_off(error)

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        report = await self._outliving(lambda: self._ranks.update(groups))
        self._furthest, self._num_without_progress = report.version, 0
        self._trained.append((report.version, groups))
        for observer in self._observers:
            observer.trained(report.version, groups)
        return report

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Returns the metrics of an offline job on these rows."""
        return await self._outliving(lambda: self._ranks.assess(groups))

    async def offload(self, part: str) -> None:
        await self._outliving(lambda: self._ranks.offload(part))

    async def onload(self) -> None:
        await self._outliving(self._ranks.onload)

    async def save(self, folder: Path) -> None:
        await self._outliving(lambda: self._ranks.save(folder))
        self._saved_by = self._generation
        newest = await asyncio.to_thread(self._newest)
        if newest is not None:  # steps up to it need not be repeated; the current save is not complete yet
            self._trained = [(version, groups) for version, groups in self._trained if version > newest[0]]

    async def finish_save(self) -> bool:
        """Waits until the last copy is on disk. Returns False if it was lost with the ranks."""
        saved_by = self._saved_by
        return await self._outliving(self._ranks.finish_save) and self._generation == saved_by

    async def load(self, folder: Path) -> int:
        return await self._outliving(lambda: self._ranks.load(folder))

    async def restore(self, folder: Path, version: int) -> None:
        """Loads an older state, which becomes `version`. A restart of the ranks loads it again, unless a checkpoint of
        `version` or later is complete."""
        await self._outliving(lambda: self._ranks.restore(folder, version))
        self._base, self._trained = (version, folder), []

    async def export(self, folder: Path) -> None:
        await self._outliving(lambda: self._ranks.export(folder))

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        return await self._outliving(lambda: self._ranks.sequence_logprobs(prompt, num_copies))

    async def manifest(self) -> Manifest:
        return await self._outliving(self._ranks.manifest)

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        rendezvous = await self._outliving(lambda: self._ranks.open_transfer(epoch, num_receivers))
        self._opened.add(epoch)
        return rendezvous

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        """Joins the transfer group. A missed deadline does not mean a lost rank: the ranks may wait for a receiver."""

        async def join() -> None:
            # Inside the repeated call: after a restart the group is gone, and a new one needs a new epoch.
            if rendezvous.epoch not in self._opened:
                raise WeightSyncError(
                    f"transfer epoch {rendezvous.epoch} was lost with the learner ranks that had opened it"
                )
            await self._ranks.join_transfer(rendezvous)

        try:
            await self._outliving(join, may_time_out=True)
        except DeadlineError as error:
            raise WeightSyncError(f"transfer group of epoch {rendezvous.epoch} did not form: {error}") from error

    async def leave_transfer(self, epoch: int) -> None:
        self._opened.discard(epoch)
        await self._outliving(lambda: self._ranks.leave_transfer(epoch))

    async def send_weights(
        self, bucket_bytes: int, epoch: int, step: VersionStep | None = None
    ) -> PushedChanges | None:
        return await self._outliving(lambda: self._ranks.send_weights(bucket_bytes, epoch, step))

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Sequence[Any]]:
        return await self._outliving(lambda: self._ranks.export_weights(bucket_bytes))

    def recall_with(self, recall: Recall) -> None:
        """Sets the function that returns the lost groups of a trained step. Without it their loss ends the run."""
        self._recall = recall

    def observe_with(self, observer: StepObserver) -> None:
        """Reports every later step and restart to `observer`."""
        self._observers.append(observer)

    async def _outliving(self, call: Callable[[], Coroutine[Any, Any, T]], *, may_time_out: bool = False) -> T:
        """Returns the answer to `call`, repeated after each restart.

        With `may_time_out` a missed deadline of the call is raised and does not count as a lost rank: the ranks wait
        for other processes.
        """
        while True:
            async with self._restarting:  # no call runs while the ranks are restored
                lost = self._lost
            try:
                if lost.done():  # noticed between calls, or the call that restarted them was cancelled
                    lost.result()
                return await _unless(lost, call())
            except LOST as error:
                if may_time_out and isinstance(error, DeadlineError) and not lost.done():
                    raise
                async with self._restarting:
                    # All calls in progress fail together: the first one restarts the ranks, the others only repeat.
                    if self._lost is lost:
                        await self._restart(error)

    def _break_off(self, error: Exception) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)
            self._lost.exception()  # marks it as retrieved: no call may be in progress to do so

    async def _restart(self, error: Exception) -> None:
        """Restarts all ranks until they are back."""
        self._break_off(error)
        while True:
            fault = report_loss("the learner", error, "it is started again and restored")
            self._on_lost("learner_hung" if isinstance(error, DeadlineError) else "learner_died")
            if self._losses.failed(error, self._furthest):
                raise RestartLoopError(
                    f"the learner was lost {MAX_EQUAL} times in a row at the same step with the same cause: "
                    f"{fault.cause}. A restart does not help; fix the cause, then go on with resume=auto"
                ) from error
            # Taken before the pause: ranks that die during their start use up the budget, too.
            pause = self._budget.take(asyncio.get_running_loop().time(), self._num_without_progress)
            if pause is None:
                raise WorkerDiedError(
                    f"the learner was lost {self._budget.num_restarts + 1} times, more than supervision.max_restarts "
                    f"allows within supervision.restart_window_s or at one step; last: {fault.cause}; fix the cause, "
                    "then go on with resume=auto"
                ) from error
            self._num_without_progress += 1
            await asyncio.sleep(pause)
            try:
                await self._bring_back(error)
            except NotRestartableError:
                raise
            except LOST as again:
                error = again
                continue
            self._lost = asyncio.get_running_loop().create_future()
            return

    async def _bring_back(self, error: Exception) -> None:
        """Restores the ranks to their version before the loss."""
        newest = await asyncio.to_thread(self._newest)
        if newest is None:
            raise NotRestartableError(f"the learner was lost before its first checkpoint: {error}") from error
        is_base = self._base is not None and self._base[0] > newest[0]
        version, folder = self._base if is_base and self._base is not None else newest
        # Before the ranks start: the copy of the lost ranks is lost even if the start fails.
        self._generation += 1
        self._opened.clear()
        await self._ranks.respawn()
        if is_base:
            await self._ranks.restore(folder, version)
        elif (loaded := await self._ranks.load(folder)) != version:
            raise CheckpointError(f"{folder} holds version {loaded} instead of {version}")
        for observer in self._observers:
            observer.restored(version)
        for n, (made, groups) in enumerate(self._trained):
            if made > version:
                again = await self._repeat(groups)
                self._trained[n] = (made, again)
                self.num_steps_repeated += 1
                for observer in self._observers:
                    observer.repeated(made, again)
        _logger.info(
            "the learner is back at version %d, from the checkpoint of version %d", self._ranks.version, version
        )

    async def _repeat(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Repeats a step. Returns the groups of the step; lost groups are read from the journal."""
        try:
            await self._ranks.update(groups)
        except LostObjectError:
            if self._recall is None:
                raise
            groups = await self._recall(groups)
            await self._ranks.update(groups)
        return groups


async def _unless(lost: asyncio.Future[None], call: Coroutine[Any, Any, T]) -> T:
    """Returns the answer to `call`, or raises the error of `lost` as soon as it is set."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieved: `lost` may be first
    try:
        either: set[asyncio.Future[Any]] = {task, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            lost.result()
        return task.result()
    finally:
        task.cancel()
