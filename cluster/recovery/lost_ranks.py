"""Reactions to the loss of a rank: raise the error, restart the ranks, or restore their state and repeat the call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mobula.cluster.errors import CheckpointError, DeadlineError, LostObjectError, RestartLoopError, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.workers.faults import report_loss
from mobula.cluster.workers.status import MAX_EQUAL, RepeatedCause, RestartBudget

_logger = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[], Coroutine[Any, Any, T]]
Errors = tuple[type[Exception], ...]
LOST = (WorkerDiedError, DeadlineError)
Recall = Callable[[Sequence[ScoredGroup]], Awaitable[Sequence[ScoredGroup]]]
_is_inside = ContextVar("_is_inside", default=False)  # within a call of `RestoredRanks`, nested ones run as they are


class NotRestartableError(WorkerDiedError):
    """The ranks cannot be restarted: there is no checkpoint."""


class StepObserver(Protocol):
    """Gets the steps of a learner as they are trained."""

    def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Called when the ranks have trained `groups`, which makes `version`."""

    def repeated(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Called when restarted ranks have trained a step again."""

    def restored(self, version: int) -> None:
        """Called when restarted ranks have loaded the checkpoint of `version`."""


class RestorableRanks(Protocol):
    """The ranks of a learner, as `RestoredRanks` restarts them."""

    version: int

    async def respawn(self) -> None:
        """Kills every rank and starts all of them again."""

    async def load(self, folder: Path) -> int: ...

    async def restore(self, folder: Path, version: int) -> None: ...

    async def step(self, groups: Sequence[ScoredGroup]) -> UpdateReport: ...


class RaiseLostRank:
    """Restarts nothing: the call raises the error of the lost rank."""

    is_restarting = False  # whether all ranks are being restarted

    def __init__(self) -> None:
        self.observers: list[StepObserver] = []  # of every later step and restart
        self.recall: Recall | None = None  # returns the lost groups of a trained step; None: their loss ends the run

    async def call(self, call: Call[T], harmless: Errors = ()) -> T:
        """Returns the answer to `call`. Errors of the types `harmless` do not mean that a rank is lost."""
        return await call()

    def lose(self, error: Exception) -> None:
        """Reports that a rank is dead or does not answer."""

    def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Called when the ranks have trained `groups`, which makes `version`."""

    async def copied(self) -> None:
        """Called when the ranks have copied their state for a checkpoint."""

    def moved(self, version: int, folder: Path) -> None:
        """Called when the ranks have loaded an older state, in `folder`, which became `version`."""


class RestartedRanks(RaiseLostRank):
    """Restarts the ranks of a training service before the next call. The caller loads their state.

    A call that fails, but not because of its arguments, means that a rank is lost or waits in a collective for one.
    """

    def __init__(self, respawn: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._respawn = respawn
        self._is_lost = False
        self._num_restarts = 0
        self._restarting = asyncio.Lock()

    async def call(self, call: Call[T], harmless: Errors = ()) -> T:
        async with self._restarting:
            if self._is_lost:
                await self._respawn()
                self._is_lost = False
                self._num_restarts += 1
        num_restarts = self._num_restarts
        try:
            return await call()
        except Exception as error:
            is_refused = isinstance(error, harmless) and not isinstance(error, DeadlineError)  # which is an OSError
            # Calls that began before a restart fail as well; they do not restart the new ranks.
            self._is_lost |= not is_refused and num_restarts == self._num_restarts
            raise


@dataclass(eq=False)
class RestoredRanks(RaiseLostRank):
    """Restarts all ranks of a run from their newest checkpoint when one is dead or hangs, and repeats the call.

    The other ranks cannot continue without the state of the lost rank. So all ranks load the newest complete checkpoint
    and repeat the later steps with the same groups. An update is a function of state and groups, so this gives the same
    weights.

    Every call is repeated until it is answered; each loss costs one restart of the budget. When a rank is lost, all
    calls in progress fail and are repeated. This includes a call whose answer has just arrived: its effect may be lost
    with the ranks. A loss before the first checkpoint ends the run.
    """

    ranks: RestorableRanks
    _: KW_ONLY
    newest: Callable[[], tuple[int, Path] | None]  # version and learner folder of the newest complete checkpoint
    budget: RestartBudget
    on_lost: Callable[[str], None]  # gets the kind of each loss: `learner_died` or `learner_hung`

    def __post_init__(self) -> None:
        super().__init__()
        self._losses = RepeatedCause()
        self._furthest = -1  # highest version made: losses with one cause at one version are a restart loop
        self._num_without_progress = 0  # restarts since the last completed step
        self._restarting = asyncio.Lock()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trained: list[tuple[int, Sequence[ScoredGroup]]] = []  # (version made, groups), since a checkpoint
        self._base: tuple[int, Path] | None = None  # of `moved`
        self.num_steps_repeated = 0

    @property
    def is_restarting(self) -> bool:  # type: ignore[override]
        return self._restarting.locked()

    def lose(self, error: Exception) -> None:
        """Calls in progress fail now, before their deadline."""
        if not self._restarting.locked():  # starting ranks do not answer yet
            self._break_off(error)

    def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        self._furthest, self._num_without_progress = version, 0
        self._trained.append((version, groups))
        for observer in self.observers:
            observer.trained(version, groups)

    async def copied(self) -> None:
        newest = await asyncio.to_thread(self.newest)
        if newest is not None:  # steps up to it need not be repeated; the current save is not complete yet
            self._trained = [(version, groups) for version, groups in self._trained if version > newest[0]]

    def moved(self, version: int, folder: Path) -> None:
        """A restart loads the state again, unless a checkpoint of `version` or later is complete."""
        if not _is_inside.get():  # else a restart has loaded it
            self._base, self._trained = (version, folder), []

    async def call(self, call: Call[T], harmless: Errors = ()) -> T:
        """Returns the answer to `call`, repeated after each restart.

        A missed deadline that is `harmless` is raised and does not count as a lost rank: the ranks wait for other
        processes.
        """
        if _is_inside.get():  # a part of another call, or of a restart
            return await call()
        token = _is_inside.set(True)
        try:
            return await self._repeated(call, harmless)
        finally:
            _is_inside.reset(token)

    async def _repeated(self, call: Call[T], harmless: Errors) -> T:
        while True:
            async with self._restarting:  # no call runs while the ranks are restored
                lost = self._lost
            try:
                if lost.done():  # noticed between calls, or the call that restarted them was cancelled
                    lost.result()
                return await _unless(lost, call())
            except LOST as error:
                if isinstance(error, harmless) and not lost.done():
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
        self._break_off(error)
        while True:
            fault = report_loss("the learner", error, "it is started again and restored")
            self.on_lost("learner_hung" if isinstance(error, DeadlineError) else "learner_died")
            if self._losses.failed(error, self._furthest):
                raise RestartLoopError(
                    f"the learner was lost {MAX_EQUAL} times in a row at the same step with the same cause: "
                    f"{fault.cause}. A restart does not help; fix the cause, then go on with resume=auto"
                ) from error
            # Taken before the pause: ranks that die during their start use up the budget, too.
            pause = self.budget.take(asyncio.get_running_loop().time(), self._num_without_progress)
            if pause is None:
                raise WorkerDiedError(
                    f"the learner was lost {self.budget.num_restarts + 1} times, more than supervision.max_restarts "
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
        newest = await asyncio.to_thread(self.newest)
        if newest is None:
            raise NotRestartableError(f"the learner was lost before its first checkpoint: {error}") from error
        is_base = self._base is not None and self._base[0] > newest[0]
        version, folder = self._base if is_base and self._base is not None else newest
        await self.ranks.respawn()
        if is_base:
            await self.ranks.restore(folder, version)
        elif (loaded := await self.ranks.load(folder)) != version:
            raise CheckpointError(f"{folder} holds version {loaded} instead of {version}")
        for observer in self.observers:
            observer.restored(version)
        for n, (made, groups) in enumerate(self._trained):
            if made > version:
                again = await self._repeat(groups)
                self._trained[n] = (made, again)
                self.num_steps_repeated += 1
                for observer in self.observers:
                    observer.repeated(made, again)
        _logger.info(
            "the learner is back at version %d, from the checkpoint of version %d", self.ranks.version, version
        )

    async def _repeat(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Repeats a step. Returns the groups of the step; lost groups are read from the journal."""
        try:
            await self.ranks.step(groups)
        except LostObjectError:
            if self.recall is None:
                raise
            groups = await self.recall(groups)
            await self.ranks.step(groups)
        return groups


async def _unless(lost: asyncio.Future[None], call: Coroutine[Any, Any, T]) -> T:
    """Returns the answer to `call`. Raises the error of `lost` once `lost` is set."""
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
