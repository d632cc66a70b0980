"""Crew: the interchangeable workers of one role, a set that changes while it is used.

Work goes to the least loaded worker, first come, first served. A worker that is lost is started again after a pause,
within its restart budget; the crew grows and shrinks while work is in flight:

    STARTING -> JOINING -> SERVING -> (lost) WAITING -> STARTING -> ...      QUARANTINED once the budget is used up
                           SERVING -> (scaled away) DRAINING -> gone

A worker of a crew does one thing after the other and has a `ping`, which it comes to when it is done with what it was
asked before. The rollout actors are no crew: they hold weights that change, and join by weight sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.concurrency import run_all
from cluster.errors import DeadlineError, LostReplyError, PreflightError, StuckError, WorkerDiedError
from cluster.faults import report_loss
from cluster.ray_group import answer
from cluster.restarts import MAX_EQUAL, RepeatedCause, RestartBudget, RestartPolicy
from cluster.status import WorkerState, WorkerStatus

_logger = logging.getLogger(__name__)

Lost = WorkerDiedError | DeadlineError | StuckError


class Hosts(Protocol):
    """Where the workers of one role run, by index."""

    async def start(self, index: int) -> Any:
        """Book a place for the worker unless it has one; returns the handle of one that builds itself there."""
        ...

    async def stop(self, index: int, handle: Any) -> None:
        """End the worker's process, in good order where it answers; its place stays booked."""
        ...

    async def release(self, index: int) -> None:
        """Give the worker's place back."""
        ...


@dataclass(eq=False)
class _Member:
    """One seat of the crew, whoever fills it."""

    name: str
    index: int
    budget: RestartBudget
    starts: RepeatedCause = field(default_factory=RepeatedCause)  # that failed
    state: WorkerState = WorkerState.STARTING
    handle: Any = None
    load: int = 0
    is_leaving: bool = False
    is_tended: bool = False  # it is being started, replaced or ended
    detail: str = ""

    def status(self) -> WorkerStatus:
        state = WorkerState.DRAINING if self.is_leaving else self.state
        return WorkerStatus(self.name, state, None, self.load, self.budget.num_restarts, self.detail)


@dataclass(frozen=True)
class Place:
    """A worker that has room for one more piece of work."""

    name: str
    handle: Any
    member: _Member


class Crew:
    """Implements `cluster.status.Scalable` for workers that hold nothing but what they are working on.

    Example:
        async with crew.place() as place:
            try:
                return await answer(place.handle.score.remote(group), timeout_s=30, what=f"{place.name} to score")
            except (WorkerDiedError, DeadlineError) as error:
                raise await crew.failed(place, error)
    """

    def __init__(
        self,
        role: str,
        handles: Sequence[Any],
        hosts: Hosts,
        *,
        max_load: int,
        restarts: RestartPolicy,
        alive_s: float,
        greet: Callable[[str, Any], Awaitable[None]],
        on_lost: Callable[[Exception], None],
        may_pile_up: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`handles` are the first workers, started on `hosts` under the indices 0, 1, ...

        A worker gets `max_load` pieces of work at a time; while `may_pile_up` says no, only one. Whoever makes it say
        yes calls `dispatch`. `greet(name, handle)` returns once a new one may serve, and `on_lost` hears of every loss.
        `alive_s` bounds the answer to a sign of life.
        """
        if not handles:
            raise ValueError(f"there is no {role} worker: set resources.{role}.num_workers to 1 or more")
        self._role = role
        self._hosts = hosts
        self._max_load = max_load
        self._restarts = restarts
        self._alive_s = alive_s
        self._greet = greet
        self._on_lost = on_lost
        self._may_pile_up = may_pile_up
        self._clock = clock
        self._members = [self._seat(index) for index in range(len(handles))]
        for member, handle in zip(self._members, handles, strict=True):
            member.handle, member.state = handle, WorkerState.SERVING
        self._queue: deque[asyncio.Future[_Member]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def handles(self) -> tuple[Any, ...]:
        """Of the workers that serve now; replaced ones are gone."""
        return tuple(member.handle for member in self._serving())

    async def start(self) -> None:
        """Wait until the first workers may serve.

        Raises:
            PreflightError: one of them cannot be built.
            DeadlineError: one of them did not answer.
        """
        try:
            await run_all(*(self._greet(member.name, member.handle) for member in self._members))
        except WorkerDiedError as error:
            raise PreflightError(f"a {self._role} worker cannot be started: {error.failure or error}") from error

    @asynccontextmanager
    async def place(self, *, is_urgent: bool = False) -> AsyncIterator[Place]:
        """A place at the least loaded worker while the body runs; waits for one, behind those who waited before.

        What is urgent goes first: work that was given before and lost its worker.

        Raises:
            WorkerDiedError: every worker is quarantined.
        """
        member = await self._next(is_urgent)
        while member.state is not WorkerState.SERVING:  # it was lost between the promise and now
            self._leave(member)
            member = await self._next(is_urgent=True)
        try:
            yield Place(member.name, member.handle, member)
        finally:
            self._leave(member)

    def lose(self, place: Place, error: Lost) -> None:
        """The worker died or hangs: it gets no more work and is replaced in the background. The first word counts."""
        member = place.member
        if member.handle is not place.handle or member.state is not WorkerState.SERVING:
            return
        self._note_loss(member, error, f"its work goes to others: {member.load} in flight")
        if not member.is_leaving:
            self._begin(member, self._refill(member))

    async def failed(self, place: Place, error: Lost) -> Lost | LostReplyError:
        """A call to the worker ended so: whoever died or hangs is replaced. One that did not answer in time, and is
        done with the call within another `alive_s`, is left alone: only its answer was lost, or late. Returns what
        befell the work.
        """
        cause = error
        if isinstance(error, DeadlineError):
            try:
                what = f"{place.name} to be done"
                await answer(place.handle.ping.remote(), timeout_s=self._alive_s, what=what)
                return LostReplyError(f"{error}, which is done with it: the answer was lost, or came too late")
            except WorkerDiedError as died:
                cause = died
            except DeadlineError:
                pass  # it hangs, as was thought
        self.lose(place, cause)
        return error

    def dispatch(self) -> None:
        """Give places to those who wait, as far as there are any. Called for whatever happens to a worker."""
        while self._queue:
            if self._queue[0].done():  # whoever waited has gone
                self._queue.popleft()
                continue
            room = self._max_load if self._may_pile_up() else 1
            free = [member for member in self._serving() if member.load < room]
            if not free:
                break
            member = min(free, key=lambda member: member.load)
            member.load += 1
            self._queue.popleft().set_result(member)
        if all(member.state is WorkerState.QUARANTINED for member in self._members):  # also once it is closed
            while self._queue:
                waiter = self._queue.popleft()
                if not waiter.done():
                    waiter.set_exception(self._nobody_left())

    async def check(self) -> None:
        """Ask every serving worker for a sign of life; a busy one gives it too. One that does not is replaced."""
        await asyncio.gather(*(self._check(member) for member in self._serving()))

    async def close(self) -> None:
        """End every worker; one that fails to close is logged and keeps no other open."""
        tasks, members = list(self._tasks), list(self._members)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()
        await asyncio.gather(*(self._end(member) for member in members))
        self.dispatch()

    def status(self) -> list[WorkerStatus]:
        return [member.status() for member in self._members]

    async def scale(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"{self._role}={num_workers}: a run with this role needs at least one worker of it")
        self._members = [m for m in self._members if m.state is not WorkerState.QUARANTINED or m.is_tended]
        staying = [member for member in self._members if not member.is_leaving]
        for member in staying[num_workers:]:
            self._drain(member)
        taken = {member.index for member in self._members}
        free = (index for index in range(num_workers + len(taken)) if index not in taken)
        for _ in range(num_workers - len(staying)):
            member = self._seat(next(free))
            self._members.append(member)
            self._begin(member, self._fill(member))
        self._members.sort(key=lambda member: member.index)

    def _seat(self, index: int) -> _Member:
        return _Member(f"{self._role}/{index}", index, RestartBudget(self._restarts))

    def _serving(self) -> list[_Member]:
        return [m for m in self._members if m.state is WorkerState.SERVING and not m.is_leaving]

    async def _next(self, is_urgent: bool) -> _Member:
        waiter: asyncio.Future[_Member] = asyncio.get_running_loop().create_future()
        if is_urgent:
            self._queue.appendleft(waiter)
        else:
            self._queue.append(waiter)
        self.dispatch()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave(waiter.result())
            raise

    def _nobody_left(self) -> WorkerDiedError:
        if not self._members:
            return WorkerDiedError(f"the {self._role} workers have been closed: the run is over")
        return self._restarts.used_up(self._role, self.status())

    def _leave(self, member: _Member) -> None:
        member.load -= 1
        self._retire_if_idle(member)
        self.dispatch()

    def _drain(self, member: _Member) -> None:
        member.is_leaving = True
        _logger.info("%s leaves once its %d pieces of work are done", member.name, member.load)
        self._retire_if_idle(member)

    def _retire_if_idle(self, member: _Member) -> None:
        if member.is_leaving and member.load == 0 and not member.is_tended and member in self._members:
            self._begin(member, self._retire(member))

    def _begin(self, member: _Member, work: Coroutine[Any, Any, None]) -> None:
        """What the crew itself does with a seat, one thing at a time, beside the work that is given to it."""
        assert not member.is_tended, f"{member.name} is tended already"
        member.is_tended = True
        task = asyncio.create_task(self._tend(member, work), name=f"tend {member.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tend(self, member: _Member, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # no task waits for this one: what it met is counted and logged here
            _logger.exception("%s could not be tended", member.name)
            self._on_lost(error)
        finally:
            member.is_tended = False
        self._retire_if_idle(member)
        self.dispatch()

    async def _fill(self, member: _Member) -> None:
        """Start workers for the seat until one may serve, within the budget."""
        member.state = WorkerState.STARTING
        try:
            member.handle = await self._hosts.start(member.index)
            member.state = WorkerState.JOINING
            await self._greet(member.name, member.handle)
        except Exception as error:  # whatever it was: counted, named, and tried again within the budget
            self._note_loss(member, error)
            if member.starts.failed(error):
                member.detail = f"it failed to start {MAX_EQUAL} times in a row with one cause; {member.detail}"
                await self._quarantine(member)
            else:
                await self._refill(member)
        else:
            member.starts.succeeded()
            member.state = WorkerState.SERVING
            _logger.info("%s serves", member.name)

    async def _refill(self, member: _Member) -> None:
        """End what is left of a lost worker, pause, and have another one; within the budget."""
        await self._end(member)
        pause = member.budget.take(self._clock())
        if pause is None:
            await self._quarantine(member)
            return
        await asyncio.sleep(pause)
        if not member.is_leaving:
            await self._fill(member)

    async def _quarantine(self, member: _Member) -> None:
        """End what is left of the worker, give its place back, and start no other."""
        await self._end(member)
        member.state = WorkerState.QUARANTINED
        await self._hosts.release(member.index)

    async def _retire(self, member: _Member) -> None:
        await self._end(member)
        try:
            await self._hosts.release(member.index)
        finally:
            self._members.remove(member)
        _logger.info("%s has left", member.name)

    async def _check(self, member: _Member) -> None:
        place = Place(member.name, member.handle, member)
        try:
            what = f"{place.name} to say that it lives"
            await answer(place.handle.is_alive.remote(), timeout_s=self._alive_s, what=what)
        except (WorkerDiedError, DeadlineError) as error:
            self.lose(place, error)

    def _note_loss(self, member: _Member, error: Exception, consequence: str = "") -> None:
        member.state = WorkerState.WAITING
        fault = report_loss(member.name, error, consequence)
        member.detail = f"{fault.kind}: {fault.cause}"
        self._on_lost(error)

    async def _end(self, member: _Member) -> None:
        handle, member.handle = member.handle, None
        if handle is None:
            return
        try:
            await self._hosts.stop(member.index, handle)
        except Exception:  # it is lost, or has left: nobody needs it any more
            _logger.warning("%s did not close in good order", member.name, exc_info=True)
