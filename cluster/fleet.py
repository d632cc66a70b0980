"""RolloutFleet: the rollout actors of a run, a set that changes while it is used.

They die, hang, answer wrongly, are replaced, join late, drain and leave; the loop and the stream see one pool. Who was
lost is started again after a pause, brought to the learner's version, and only then sampled from:

    STARTING -> JOINING -> SERVING -> (lost) WAITING -> STARTING -> ...      QUARANTINED once the budget is used up
                           SERVING -> (scaled away) DRAINING -> gone
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from cluster.concurrency import run_all
from cluster.errors import (
    DeadlineError,
    EngineDiedError,
    ExcludedPromptError,
    LostReplyError,
    MobulaError,
    RestartLoopError,
    WorkerDiedError,
)
from cluster.faults import report_loss
from cluster.restarts import MAX_EQUAL, RestartBudget, RestartPolicy
from cluster.roles import SamplingSettings
from cluster.seats import Seat as EngineSeat
from cluster.status import WorkerState, WorkerStatus
from cluster.supervision import background_tasks
from cluster.suspects import Suspects
from cluster.trajectory import Generated, Prompt
from cluster.weight_sync.members import Receiver

_logger = logging.getLogger(__name__)


class Engine(Receiver, Protocol):
    """One rollout actor as the fleet sees it; every call has a deadline of its own."""

    async def start(self) -> None:
        """Load the model."""
        ...

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated: ...

    async def is_alive(self) -> None:
        """Return while the process lives, however busy it is."""
        ...

    async def probe(self) -> None:
        """Sample one token with the engine itself."""
        ...

    async def close(self) -> None:
        """End the process and give its resources back, whatever state it is in."""
        ...


Seat = EngineSeat[Engine]


@dataclass(frozen=True)
class HealthChecks:
    """How the fleet looks after its engines. An engine that finished something since the last look is healthy: busy is
    alive. One that is idle or silent is asked to sample a token."""

    interval_s: float
    probe_interval_s: float
    max_failures_in_a_row: int  # groups that one engine may fail, one after the other, before it is replaced
    no_worker_s: float  # how long a prompt waits while no engine serves


class RolloutFleet:
    """Implements `cluster.roles.Rollouts`, `weight_sync.Members` and `cluster.status.Scalable`.

    Example:
        fleet = RolloutFleet(spawn, 2, release=release, policy=policy, health=health, on_lost=count)
        await fleet.start()
        fleet.admit_with(weights.admit)
        async with fleet.tended():
            ...
    """

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Engine]],
        num_workers: int,
        *,
        release: Callable[[int], Awaitable[None]],
        policy: RestartPolicy,
        health: HealthChecks,
        on_lost: Callable[[str], None],
        on_excluded: Callable[[Prompt, ExcludedPromptError], None] = lambda prompt, error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`spawn(index)` makes the process of one engine, `release(index)` gives back the place of one that has left;
        `on_lost` is called with the kind of each loss, `on_excluded` with each prompt that ended several engines.
        """
        self._spawn = spawn
        self._release = release
        self._policy = policy
        self._health = health
        self._on_lost = on_lost
        self._clock = clock
        self._seats = [self._seat(index) for index in range(num_workers)]
        self._admit: Callable[[Receiver], Awaitable[int]] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()  # set, and replaced, whenever an engine changes
        self._version = -1
        self._announced = -1
        self._suspects = Suspects(on_excluded)
        self._loop_found: RestartLoopError | None = None

    def admit_with(self, admit: Callable[[Receiver], Awaitable[int]]) -> None:
        """How a late joiner gets weights: `WeightSync.admit`."""
        self._admit = admit

    async def start(self) -> None:
        """Start the first engines, side by side. One that fails here ends the start: nothing has been proved yet."""
        await run_all(*(self._first_start(seat) for seat in self._seats))

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Watch the engines and replace lost ones while the body runs.

        Raises:
            WorkerDiedError: every engine was lost more often than its budget allows; the body was cancelled.
            RestartLoopError: engines die soon after pushes with the same cause; the body was cancelled.
        """
        async with background_tasks() as tasks:
            self._tasks = tasks
            tasks.create_task(self._watch(), name="watch the rollout actors")
            for seat in self._seats:
                if seat.state is WorkerState.WAITING:  # lost before anybody tended it
                    tasks.create_task(self._replace(seat), name=f"replace {seat.name}")
            try:
                yield
            finally:
                self._tasks = None

    async def close(self) -> None:
        """End every engine; one that fails to close is logged and keeps no other open."""
        seats, self._seats = self._seats, []
        await asyncio.gather(*(self._end(seat) for seat in seats))

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """Sample one prompt on the engine with the fewest prompts in flight.

        Raises:
            WorkerDiedError, DeadlineError, EngineDiedError: the engine was lost, and is being replaced; or none serves.
            LostReplyError: the engine did not answer in time, and is well.
            RolloutError: the engine could not do it.
            ExcludedPromptError: the prompt ended several engines, and is not sampled any more.
        """
        async with self._suspects.admitted(prompt):
            seat, engine = await self._pick(prompt)
            with seat.working_at(prompt):
                return await self._generate_on(seat, engine, prompt, settings)

    async def _generate_on(self, seat: Seat, engine: Engine, prompt: Prompt, settings: SamplingSettings) -> Generated:
        try:
            result = await engine.generate(prompt, settings)
        except (WorkerDiedError, EngineDiedError) as error:
            self._lose(seat, engine, error)
            # The engine may be ended before it has answered all prompts: they too end with the cause.
            raise seat.death or error from None
        except DeadlineError as error:
            raise await self._missed(seat, engine, error) from None
        except MobulaError as error:
            self._failed(seat, engine, error)
            raise
        seat.num_failures_in_a_row = 0
        seat.last_sign_s = self._clock()
        return result

    def receivers(self) -> list[Receiver]:
        """Engines whose weights are to be kept up to date."""
        return [seat.engine for seat in self._seats if seat.engine and seat.state is WorkerState.SERVING]

    def synced(self, receiver: Receiver, version: int) -> None:
        seat = self._seat_of(receiver)
        if seat is not None:
            seat.version = version
            seat.last_sign_s = self._clock()
            self._notify()

    def announced(self, version: int) -> None:
        self._announced = version
        for seat in self._seats:
            if seat.state is WorkerState.SERVING:
                seat.num_pushes += 1

    def published(self, version: int) -> None:
        self._version = version
        self._notify()

    def lose(self, receiver: Receiver, error: Exception) -> None:
        seat = self._seat_of(receiver)
        if seat is not None and seat.engine is not None:
            self._lose(seat, seat.engine, error)

    def status(self) -> list[WorkerStatus]:
        return [seat.status() for seat in self._seats]

    async def scale(self, num_workers: int) -> None:
        """Have so many engines: new ones join in the background, superfluous ones finish what they have and leave."""
        if num_workers < 1:
            raise ValueError(f"rollout={num_workers}: a run needs at least one rollout actor")
        tasks = self._tasks
        if tasks is None:
            raise ValueError("the run has not begun or is over: scale it while it trains")
        staying = [seat for seat in self._seats if seat.state is not WorkerState.DRAINING]
        for seat in staying[num_workers:]:
            self._set(seat, WorkerState.DRAINING)
            tasks.create_task(self._drain(seat), name=f"drain {seat.name}")
        taken = {seat.index for seat in self._seats}
        free = (index for index in range(num_workers + len(self._seats)) if index not in taken)
        for index in [next(free) for _ in range(num_workers - len(staying))]:
            seat = self._seat(index)
            self._seats.append(seat)
            tasks.create_task(self._add(seat), name=f"start {seat.name}")
        self._seats.sort(key=lambda seat: seat.index)

    def _seat(self, index: int) -> Seat:
        return Seat(index, RestartBudget(self._policy))

    def _seat_of(self, receiver: Receiver) -> Seat | None:
        return next((seat for seat in self._seats if seat.engine is receiver), None)

    async def _first_start(self, seat: Seat) -> None:
        seat.engine = await self._spawn(seat.index)
        await seat.engine.start()
        self._serve(seat, await seat.engine.weight_version())

    async def _pick(self, prompt: Prompt) -> tuple[Seat, Engine]:
        """A serving engine at the published version; waits for one."""
        try:
            async with asyncio.timeout(self._health.no_worker_s):
                while not (serving := self._serving()):
                    await self._changed.wait()
        except TimeoutError as error:
            states = ", ".join(f"{seat.name} {seat.state}" for seat in self._seats)
            raise DeadlineError(
                f"prompt {prompt.prompt_id} waited {self._health.no_worker_s:g} s for a rollout actor: {states}"
            ) from error
        seat = min(serving, key=lambda seat: seat.num_in_flight)
        assert seat.engine is not None
        return seat, seat.engine

    def _serving(self) -> list[Seat]:
        return [
            seat
            for seat in self._seats
            if seat.state is WorkerState.SERVING and seat.version is not None and seat.version >= self._version
        ]

    def _serve(self, seat: Seat, version: int) -> None:
        seat.version = version
        seat.last_sign_s = self._clock()
        seat.num_failures_in_a_row = seat.num_pushes = 0
        seat.starts.succeeded()
        seat.death = None
        self._set(seat, WorkerState.SERVING)

    def _set(self, seat: Seat, state: WorkerState) -> None:
        seat.state = state
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _failed(self, seat: Seat, engine: Engine, error: MobulaError) -> None:
        """An engine whose process lives and which answers with errors alone, or not at all, is as good as dead."""
        if seat.engine is not engine:
            return
        seat.num_failures_in_a_row += 1
        if seat.num_failures_in_a_row >= self._health.max_failures_in_a_row:
            self._lose(seat, engine, error)

    async def _missed(self, seat: Seat, engine: Engine, error: DeadlineError) -> DeadlineError | LostReplyError:
        """What befell a prompt that was not answered in time: an engine that cannot sample one token is lost."""
        try:
            await engine.probe()
        except Exception as silence:  # whatever an engine answers to this, it is not well
            self._lose(seat, engine, silence)
            return error
        lost = LostReplyError(f"{error}, which is well: the answer was lost, or takes longer than timeouts.rollout_s")
        self._failed(seat, engine, lost)
        return lost

    def _lose(self, seat: Seat, engine: Engine, error: Exception) -> None:
        """Take the engine out of the fleet at once; it is ended and replaced in the background."""
        if seat.engine is not engine or seat.state not in (WorkerState.SERVING, WorkerState.DRAINING):
            return
        seat.death = error if isinstance(error, EngineDiedError) else None
        self._note_loss(seat, error, f"prompts in flight that are retried: {seat.num_in_flight}")
        self._loop_found = self._loop_found or self._suspects.engine_died(
            error, seat.num_pushes, {prompt.prompt_id: prompt for prompt in seat.in_flight.values()}
        )
        if seat.state is WorkerState.DRAINING:
            return  # only its drain waits for it
        self._set(seat, WorkerState.WAITING)
        if self._tasks is not None:
            self._tasks.create_task(self._replace(seat), name=f"replace {seat.name}")

    def _note_loss(self, seat: Seat, error: Exception, consequence: str = "") -> None:
        fault = report_loss(seat.name, error, consequence)
        self._on_lost(f"rollout_{fault.kind}")
        seat.detail = f"{fault.kind}: {fault.cause}"

    async def _replace(self, seat: Seat) -> None:
        """End what is left of the seat's engine, pause, and have another; within the budget."""
        while seat in self._seats:
            if self._loop_found is not None:
                raise self._loop_found
            await self._end(seat)
            pause = None if seat.starts.are_equal else seat.budget.take(self._clock())
            if pause is None:
                self._set(seat, WorkerState.QUARANTINED)
                self._refuse_to_go_on_alone()
                return
            await asyncio.sleep(pause)
            if seat not in self._seats or await self._fill(seat):
                return

    async def _add(self, seat: Seat) -> None:
        """The first engine of a new seat."""
        if not await self._fill(seat):
            await self._replace(seat)

    async def _fill(self, seat: Seat) -> bool:
        """Start an engine, bring it to the learner's version, and let it serve; says whether that is done with."""
        self._set(seat, WorkerState.STARTING)
        try:
            seat.engine = await self._spawn(seat.index)
            await seat.engine.start()
            self._set(seat, WorkerState.JOINING)
            assert self._admit is not None, "admit_with() tells how a joiner gets weights"
            while (version := await self._admit(seat.engine)) < max(self._version, self._announced):
                pass  # a push began meanwhile, without it
        except Exception as error:  # whatever it was: counted, named, and tried again within the budget
            if seat in self._seats:
                self._note_loss(seat, error)
                if seat.starts.failed(error):
                    seat.detail = f"it failed to start {MAX_EQUAL} times in a row with one cause; {seat.detail}"
                self._set(seat, WorkerState.WAITING)
                return False
            _logger.info("%s had not started when it left: %s", seat.name, error)
        if seat in self._seats:
            _logger.info("%s serves version %d", seat.name, version)
            self._serve(seat, version)
        else:  # it was scaled away meanwhile
            await self._end(seat)
        return True

    def _refuse_to_go_on_alone(self) -> None:
        if all(seat.state is WorkerState.QUARANTINED for seat in self._seats):
            raise self._policy.used_up("rollout", self.status())

    async def _drain(self, seat: Seat) -> None:
        if seat.num_in_flight:
            await seat.idle.wait()  # each of its calls has a deadline
        self._seats.remove(seat)
        await self._end(seat)
        await self._release(seat.index)
        _logger.info("%s has left", seat.name)

    async def _end(self, seat: Seat) -> None:
        engine, seat.engine, seat.version = seat.engine, None, None
        if engine is None:
            return
        try:
            await engine.close()
        except Exception:  # it is replaced or the run is over: either way nobody needs it any more
            _logger.warning("%s did not close in good order", seat.name, exc_info=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._health.interval_s)
            await asyncio.gather(*(self._look_at(seat) for seat in self._seats))

    async def _look_at(self, seat: Seat) -> None:
        engine = seat.engine
        if engine is None or seat.state is not WorkerState.SERVING:
            return  # an engine that starts or joins is waited for by whoever does that
        try:
            await engine.is_alive()
            if self._clock() - seat.last_sign_s > self._health.probe_interval_s and seat.version is not None:
                await engine.probe()
                seat.last_sign_s = self._clock()
        except Exception as error:  # whatever an engine answers to this, it is not well
            self._lose(seat, engine, error)
