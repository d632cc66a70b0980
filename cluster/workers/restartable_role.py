"""RestartableRole: a role that is brought back, within a budget, whenever a call finds it dead or silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, TypeVar

from mobula.cluster.errors import DeadlineError, RestartLoopError, WorkerDiedError
from mobula.cluster.workers.faults import report_loss
from mobula.cluster.workers.restart_policy import MAX_EQUAL, RepeatedCause, RestartBudget

T = TypeVar("T")
ROLE_LOST = (WorkerDiedError, DeadlineError)


class NotRestartableError(WorkerDiedError):
    """The role cannot be brought back at all."""


class RestartableRole:
    """Makes calls to one role until they are answered; each loss on the way costs one restart.

    Calls that are under way when the role is lost all fail and are made again, also one whose answer has just come:
    what the role did for it may be lost with it.

    Example:
        role = RestartableRole("learner", bring_back, budget=budget, on_lost=count)
        report = await role.outliving(lambda: ranks.update(groups))
    """

    def __init__(
        self,
        role: str,
        bring_back: Callable[[Exception], Awaitable[None]],
        *,
        budget: RestartBudget,
        on_lost: Callable[[str], None],
        position: Callable[[], Hashable] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`position()` is how far the role has come: losses with one cause at one position are a restart loop.

        `bring_back(error)` ends what is left of the role and restores its state; `error` is the loss.

        It raises WorkerDiedError or DeadlineError to be called again, NotRestartableError to end the run. `on_lost` is
        called with the kind of each loss: `<role>_died` or `<role>_hung`.
        """
        self._role = role
        self._bring_back = bring_back
        self._budget = budget
        self._on_lost = on_lost
        self._position = position
        self._losses = RepeatedCause()
        self._clock = clock
        self._under_way = asyncio.Lock()
        self._generation = 0
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_restarting(self) -> bool:
        """Whether the role is being brought back."""
        return self._under_way.locked()

    def lose(self, error: Exception) -> None:
        """The role was found dead or silent: calls under way end now instead of at their deadline.

        Nothing is to be learned from it while the role is restored.
        """
        if not self._under_way.locked():
            self._break_off(error)

    async def outliving(self, call: Callable[[], Coroutine[Any, Any, T]], *, is_patient: bool = False) -> T:
        """The answer to `call`, made as often as that takes.

        A patient call waits for others behind the role, so that missing its own deadline does not mean that the role is
        lost.
        """
        while True:
            async with self._under_way:  # no call runs while the role is restored
                generation, lost = self._generation, self._lost
            try:
                if lost.done():  # noticed between calls, or the call that restored it was cancelled
                    lost.result()
                return await _unless(lost, call())
            except ROLE_LOST as error:
                if is_patient and isinstance(error, DeadlineError) and not lost.done():
                    raise
                async with self._under_way:
                    if self._generation == generation:  # else another call that failed with this one has done it
                        await self._restore(error)

    def _break_off(self, error: Exception) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)
            self._lost.exception()  # it is looked at when a call is made; none may be

    async def _restore(self, error: Exception) -> None:
        """Raises: WorkerDiedError: the restart budget is used up, or the role cannot be restarted."""
        self._break_off(error)
        while True:
            fault = report_loss(f"the {self._role}", error, "it is started again and restored")
            self._on_lost(f"{self._role}_{'hung' if isinstance(error, DeadlineError) else 'died'}")
            if self._losses.failed(error, self._position()):
                raise RestartLoopError(
                    f"the {self._role} was lost {MAX_EQUAL} times in a row at the same place with the same cause: "
                    f"{fault.cause}. A restart does not change that; fix the cause, then go on with resume=auto"
                ) from error
            pause = self._budget.take(self._clock())
            if pause is None:
                raise WorkerDiedError(
                    f"the {self._role} was lost {self._budget.num_restarts + 1} times, more than "
                    f"supervision.max_restarts allows; last: {fault.cause}; fix the cause, then go on with resume=auto"
                ) from error
            await asyncio.sleep(pause)
            try:
                await self._bring_back(error)
            except NotRestartableError:
                raise
            except ROLE_LOST as again:
                error = again
                continue
            self._lost = asyncio.get_running_loop().create_future()
            self._generation += 1
            return


async def _unless(lost: asyncio.Future[None], call: Awaitable[T]) -> T:
    task = asyncio.ensure_future(call)
    task.add_done_callback(_look_at)  # no other place does: another call may have found the loss first
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            lost.result()
        return task.result()
    finally:
        task.cancel()


def _look_at(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
