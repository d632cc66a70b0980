"""WorkQueue: distributes work to the least loaded worker of a role, first in, first out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, Protocol

from mobula.cluster.errors import DeadlineError, LostReplyError, PreflightError, StuckError, WorkerDiedError
from mobula.cluster.runtime.ray_actors import answer
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.workers.status import RestartPolicy, WorkerState
from mobula.cluster.workers.worker_pool import Hooks, Worker, WorkerPool

Lost = WorkerDiedError | DeadlineError | StuckError


class Hosts(Protocol):
    """Starts and ends the workers of one role: `start`, `stop` and `release` of `worker_pool.Hooks`."""

    async def start(self, index: int) -> Any: ...

    async def stop(self, index: int, handle: Any) -> None: ...

    async def release(self, index: int) -> None: ...


@dataclass(frozen=True)
class WorkerSlot:
    """A slot for one piece of work at a worker."""

    name: str
    handle: Any


@dataclass(eq=False)
class WorkQueue:
    """A queue in front of a `WorkerPool` of stateless workers.

    Workers are Ray actors that run their calls one after the other. `ping` is answered after all earlier calls,
    `is_alive` at once.

    Example:
        async with work.slot() as slot:
            try:
                return await answer(slot.handle.score.remote(group), timeout_s=30, what=f"{slot.name} to score")
            except (WorkerDiedError, DeadlineError) as error:
                raise await work.failed(slot, error)
    """

    role: str
    first: InitVar[Sequence[Any]]  # workers that `hosts` has started with the indices 0, 1, ...
    hosts: Hosts
    _: KW_ONLY
    max_load: int  # pieces of work at a worker at a time; one while `may_pile_up` returns False
    restarts: RestartPolicy
    alive_s: float  # bounds the answers to `is_alive` and `ping`
    join: Callable[[str, Any], Awaitable[None]]  # as in `worker_pool.Hooks`
    on_lost: Callable[[Exception], None]  # called for every loss of a worker
    may_pile_up: Callable[[], bool] = lambda: True  # call `dispatch` when its result changes

    def __post_init__(self, first: Sequence[Any]) -> None:
        hooks: Hooks[Any] = Hooks(
            start=self.hosts.start,
            join=self.join,
            check=self._check,
            stop=self.hosts.stop,
            release=self.hosts.release,
            on_lost=lambda worker, error: self.on_lost(error),
            on_change=self.dispatch,
        )
        self.pool: WorkerPool[Any] = WorkerPool(self.role, first, hooks, restarts=self.restarts)
        self._queue: deque[asyncio.Future[Worker[Any]]] = deque()

    @property
    def handles(self) -> tuple[Any, ...]:
        return tuple(worker.handle for worker in self.pool.serving)

    async def start(self) -> None:
        try:
            await self.pool.start()
        except WorkerDiedError as error:
            raise PreflightError(f"a {self.pool.role} worker cannot be started: {error.failure or error}") from error

    @asynccontextmanager
    async def slot(self, *, is_urgent: bool = False) -> AsyncIterator[WorkerSlot]:
        """Holds a slot at the least loaded worker while the body runs. Callers wait in the order of their calls. Urgent
        work, such as a repetition after a failure, goes first."""
        worker = await self._next(is_urgent)
        while worker.state is not WorkerState.SERVING:  # lost between the assignment and now
            self._leave(worker)
            worker = await self._next(is_urgent=True)
        try:
            yield WorkerSlot(worker.name, worker.handle)
        finally:
            self._leave(worker)

    def lose(self, slot: WorkerSlot, error: Lost) -> None:
        """Reports that the worker died or hangs. It gets no more work and is restarted in the background."""
        self.pool.lose(slot.handle, error)

    async def failed(self, slot: WorkerSlot, error: Lost) -> Lost | LostReplyError:
        """Handles a failed call and returns the error to raise for the work.

        A worker that died or hangs is lost. A worker that missed a deadline but answers `ping` within `alive_s` has
        finished the call; the reply was lost or late. It is kept, and the error is a LostReplyError.
        """
        cause = error
        if isinstance(error, DeadlineError):
            try:
                # `ping` waits in the same queue as the call: its answer proves that the call has ended.
                what = f"{slot.name} to finish the call"
                await answer(slot.handle.ping.remote(), timeout_s=self.alive_s, what=what)
                return LostReplyError(f"{error}: the worker is healthy, but its reply was lost or too late")
            except WorkerDiedError as died:
                cause = died
            except DeadlineError:
                pass  # the worker hangs
        self.lose(slot, cause)
        return error

    def dispatch(self) -> None:
        """Assigns waiting work to free slots. Called after every change of a worker and of `may_pile_up`."""
        while self._queue:
            if self._queue[0].done():  # the work was cancelled
                self._queue.popleft()
                continue
            room = self.max_load if self.may_pile_up() else 1
            free = [worker for worker in self.pool.serving if worker.load < room]
            if not free:
                break
            worker = min(free, key=lambda worker: worker.load)
            worker.load += 1
            self._queue.popleft().set_result(worker)
        while self._queue and (error := self.pool.exhausted()) is not None:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    async def _next(self, is_urgent: bool) -> Worker[Any]:
        waiter: asyncio.Future[Worker[Any]] = asyncio.get_running_loop().create_future()
        if is_urgent:
            self._queue.appendleft(waiter)
        else:
            self._queue.append(waiter)
        self.dispatch()
        try:
            return await waiter
        except asyncio.CancelledError:
            # The future may have been resolved just before the cancellation: release the assigned worker.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave(waiter.result())
            raise

    def _leave(self, worker: Worker[Any]) -> None:
        self.pool.end_work(worker)
        self.dispatch()

    async def _check(self, name: str, handle: Any) -> Vitals:
        return await answer(handle.is_alive.remote(), timeout_s=self.alive_s, what=f"{name} to answer that it is alive")
