"""WorkerPool: starts, restarts, scales and closes the interchangeable workers of one role.

    STARTING -> JOINING -> SERVING -> (lost) WAITING -> STARTING -> ...      QUARANTINED once no restart is left
                           SERVING -> (scaled away) DRAINING -> removed

A lost worker is restarted after a pause, within its restart budget. The users of the pool distribute the work:
`mobula.cluster.workers.work_queue.WorkQueue` and `mobula.cluster.rollout.rollout_pool.RolloutPool`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Generic, TypeVar

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.workers.faults import report_loss
from mobula.cluster.workers.status import (
    MAX_EQUAL,
    RepeatedCause,
    RestartBudget,
    RestartPolicy,
    WorkerState,
    WorkerStatus,
)

_logger = logging.getLogger(__name__)

Handle = TypeVar("Handle")


@dataclass(eq=False)
class Worker(Generic[Handle]):
    """One member of a pool. Every restart creates a new process; `handle` is the current one."""

    name: str  # <role>/<index>
    index: int
    budget: RestartBudget
    state: WorkerState = WorkerState.STARTING
    handle: Handle | None = None
    load: int = 0  # pieces of work in flight
    detail: str = ""  # cause of the last loss
    vitals: Vitals | None = None  # of the newest health check of its process
    failed_starts: RepeatedCause = field(default_factory=RepeatedCause)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # set when the worker is scaled away
    task: asyncio.Task[None] | None = None  # start, restart or removal in progress

    @property
    def process(self) -> Handle:
        assert self.handle is not None, f"{self.name} has no process"
        return self.handle

    @property
    def is_serving(self) -> bool:
        return self.state is WorkerState.SERVING and not self.leaving.is_set()

    def status(self) -> WorkerStatus:
        state = WorkerState.DRAINING if self.leaving.is_set() else self.state
        return WorkerStatus(self.name, state, None, self.load, self.budget.num_restarts, self.detail, self.vitals)


@dataclass(frozen=True, kw_only=True)
class Hooks(Generic[Handle]):
    """The parts of a worker pool that differ between roles. `handle` is the return value of `start`."""

    start: Callable[[int], Awaitable[Handle]]  # (index): reserve resources, start a process there, return at once
    join: Callable[[str, Handle], Awaitable[None]]  # (name, handle): return once it is built and has model or weights
    check: Callable[[str, Handle], Awaitable[Vitals | None]]  # (name, handle): raise if the worker is not healthy
    stop: Callable[[int, Handle], Awaitable[None]]  # (index, handle): end the process; resources stay reserved
    release: Callable[[int], Awaitable[None]]  # (index): release the resources, if any are reserved
    on_lost: Callable[[Worker[Handle], Exception], None]  # each loss and failed start, before the state changes
    on_change: Callable[[], None]  # after each change of a worker's state


@dataclass(eq=False)
class WorkerPool(Generic[Handle]):
    """Owns the workers of one role: first start, loss, restart, quarantine, draining, scaling and closing."""

    role: str
    first: InitVar[Sequence[Handle | None]]  # may get work at once; `start()` starts workers without a handle
    hooks: Hooks[Handle]
    _: KW_ONLY
    restarts: RestartPolicy
    work: str = "calls"  # plural of one piece of work, for log lines

    def __post_init__(self, first: Sequence[Handle | None]) -> None:
        if not first:
            raise ValueError(f"there is no {self.role} worker: set resources.{self.role}.num_workers to 1 or more")
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self.workers = [self._new_worker(index) for index in range(len(first))]  # by index
        for worker, handle in zip(self.workers, first, strict=True):
            if handle is not None:
                worker.handle, worker.state = handle, WorkerState.SERVING

    @property
    def serving(self) -> list[Worker[Handle]]:
        """Workers that take new work."""
        return [worker for worker in self.workers if worker.is_serving]

    def status(self) -> list[WorkerStatus]:
        return [worker.status() for worker in self.workers]

    async def start(self) -> None:
        """Starts the first workers concurrently and waits until they serve. Errors are not retried."""
        await run_all(*(self._start_first(worker) for worker in self.workers))

    def lose(self, handle: Handle, error: Exception) -> None:
        """Restarts the worker of a dead or hanging process in the background. Repeated reports are ignored."""
        worker = next((worker for worker in self.workers if worker.handle is handle), None)
        if worker is None or worker.state is not WorkerState.SERVING:
            return
        self._note_loss(worker, error, f"{self.work} in flight that are retried: {worker.load}")
        if not worker.leaving.is_set():
            self._begin(worker, self._restart)

    def end_work(self, worker: Worker[Handle]) -> None:
        """Called when a piece of work is done or failed. The caller has counted its start in `worker.load`."""
        worker.load -= 1
        self._remove_if_idle(worker)

    async def check(self) -> None:
        """Checks all serving workers concurrently; workers that fail the check are lost."""

        async def check_one(worker: Worker[Handle]) -> None:
            handle = worker.process
            try:
                worker.vitals = await self.hooks.check(worker.name, handle)
            except Exception as error:  # a healthy worker raises nothing here
                self.lose(handle, error)

        await asyncio.gather(*(check_one(worker) for worker in self.serving))

    async def scale(self, num_workers: int) -> None:
        """Sets the target number of workers: new workers start in the background, surplus workers drain. Quarantined
        workers do not count and are removed."""
        if num_workers < 1:
            raise ValueError(f"{self.role}={num_workers}: a run with this role needs at least one worker")
        # A quarantined worker with a task is still releasing its resources.
        self.workers = [w for w in self.workers if w.state is not WorkerState.QUARANTINED or w.task is not None]
        staying = [worker for worker in self.workers if not worker.leaving.is_set()]
        for worker in staying[num_workers:]:
            worker.leaving.set()
            _logger.info("%s drains: %s in flight: %d", worker.name, self.work, worker.load)
            if worker.task is not None and not self._is_stopped:
                # The start fails soon, and the worker is removed.
                self._run(self._abort_start(worker), f"abort the start of {worker.name}")
            self._remove_if_idle(worker)
        taken = {worker.index for worker in self.workers}
        free = (index for index in range(num_workers + len(taken)) if index not in taken)
        for _ in range(num_workers - len(staying)):
            worker = self._new_worker(next(free))
            self.workers.append(worker)
            self._begin(worker, self._start)
        self.workers.sort(key=lambda worker: worker.index)

    def exhausted(self) -> WorkerDiedError | None:
        """Returns the error for waiting work if no worker can serve again; else None."""
        if not self.workers:
            return WorkerDiedError(f"the {self.role} workers have been closed: the run is over")
        if all(worker.state is WorkerState.QUARANTINED for worker in self.workers):
            return self.restarts.used_up(self.role, self.status())
        return None

    async def stop_restarts(self) -> None:
        """Cancels every start, restart and removal in progress, and begins no further ones."""
        self._is_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Ends every worker. The error of one worker is logged and does not affect the others."""
        await self.stop_restarts()
        workers, self.workers = self.workers, []
        await asyncio.gather(*(self._end(worker) for worker in workers))
        self.hooks.on_change()

    def _new_worker(self, index: int) -> Worker[Handle]:
        return Worker(f"{self.role}/{index}", index, RestartBudget(self.restarts))

    def _set(self, worker: Worker[Handle], state: WorkerState) -> None:
        worker.state = state
        self.hooks.on_change()

    async def _start_first(self, worker: Worker[Handle]) -> None:
        is_new = worker.handle is None
        if worker.handle is None:
            worker.handle = await self.hooks.start(worker.index)
            self._set(worker, WorkerState.JOINING)
        await self.hooks.join(worker.name, worker.handle)
        if is_new:
            self._set(worker, WorkerState.SERVING)

    async def _start(self, worker: Worker[Handle]) -> None:
        while not await self._try_start(worker):
            if not await self._clear(worker):
                return

    async def _restart(self, worker: Worker[Handle]) -> None:
        if await self._clear(worker):
            await self._start(worker)

    async def _try_start(self, worker: Worker[Handle]) -> bool:
        self._set(worker, WorkerState.STARTING)
        try:
            worker.handle = await self.hooks.start(worker.index)
            if not worker.leaving.is_set():
                self._set(worker, WorkerState.JOINING)
                await self.hooks.join(worker.name, worker.handle)
        except Exception as error:  # any error: it is counted and logged, and the start is retried within the budget
            if worker.leaving.is_set():
                _logger.info("%s was scaled away during its start: %s", worker.name, error)
                return True
            self._note_loss(worker, error)
            if worker.failed_starts.failed(error):
                worker.detail = f"it failed to start {MAX_EQUAL} times in a row with one cause; {worker.detail}"
            return False
        worker.failed_starts.succeeded()
        if not worker.leaving.is_set():
            self._set(worker, WorkerState.SERVING)
            _logger.info("%s serves", worker.name)
        return True

    async def _clear(self, worker: Worker[Handle]) -> bool:
        """Ends the process of a lost worker and pauses. Returns whether to start the worker again. The worker is
        quarantined if no restart is left, and not started again if it is scaled away during the pause."""
        await self._end(worker)
        pause = None if worker.failed_starts.are_equal else worker.budget.take(asyncio.get_running_loop().time())
        if pause is None:
            self._set(worker, WorkerState.QUARANTINED)
            await self.hooks.release(worker.index)
            return False
        try:
            # Waits for `leaving`, not only for the time: a worker that is scaled away must not start again.
            async with asyncio.timeout(pause):
                await worker.leaving.wait()
        except TimeoutError:
            return True
        return False

    async def _abort_start(self, worker: Worker[Handle]) -> None:
        await self._end(worker)
        if worker.state is WorkerState.STARTING:
            try:
                await self.hooks.release(worker.index)
            except Exception:  # the removal that follows releases it again
                _logger.exception("the resources of %s cannot be released", worker.name)

    def _remove_if_idle(self, worker: Worker[Handle]) -> None:
        if worker.leaving.is_set() and worker.load == 0 and worker.task is None and worker in self.workers:
            self._begin(worker, self._remove)

    async def _remove(self, worker: Worker[Handle]) -> None:
        await self._end(worker)
        try:
            await self.hooks.release(worker.index)
        finally:
            self.workers.remove(worker)  # last: a new worker may take the index once the resources are free
        _logger.info("%s is removed", worker.name)

    def _begin(self, worker: Worker[Handle], work: Callable[[Worker[Handle]], Coroutine[Any, Any, None]]) -> None:
        """Runs a start, restart or removal of the worker in the background, one at a time."""
        if self._is_stopped:
            return
        assert worker.task is None, f"{worker.name} is already being started, restarted or removed"
        worker.task = self._run(self._guarded(worker, work), f"maintain {worker.name}")

    async def _guarded(
        self, worker: Worker[Handle], work: Callable[[Worker[Handle]], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            await work(worker)
        except Exception as error:  # no caller waits for this task: the error is counted and logged here
            _logger.exception("%s cannot be restarted or removed and is quarantined", worker.name)
            worker.state, worker.detail = WorkerState.QUARANTINED, f"error: {error}"
            self.hooks.on_lost(worker, error)
            await self._end(worker)
        finally:
            worker.task = None
        self._remove_if_idle(worker)
        self.hooks.on_change()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _note_loss(self, worker: Worker[Handle], error: Exception, consequence: str = "") -> None:
        fault = report_loss(worker.name, error, consequence)
        worker.detail = f"{fault.kind}: {fault.cause}"
        self.hooks.on_lost(worker, error)
        self._set(worker, WorkerState.WAITING)

    async def _end(self, worker: Worker[Handle]) -> None:
        handle, worker.handle, worker.vitals = worker.handle, None, None
        if handle is None:
            return
        try:
            await self.hooks.stop(worker.index, handle)
        except Exception:  # the worker is lost or removed: its process is not used again
            _logger.warning("%s did not close cleanly", worker.name, exc_info=True)
