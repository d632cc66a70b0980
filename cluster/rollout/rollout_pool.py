"""RolloutPool: distributes prompts to rollout actors, and tracks weight version and health of each actor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from mobula.cluster import errors
from mobula.cluster.records.trajectory import Generated, Prompt
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.weight_sync.interfaces import Receiver
from mobula.cluster.weight_sync.tolerance import SamplingEngine
from mobula.cluster.workers.faults import Suspects
from mobula.cluster.workers.status import RestartPolicy, WorkerState, WorkerStatus
from mobula.cluster.workers.supervisor import background_tasks
from mobula.cluster.workers.worker_pool import Hooks, Worker, WorkerPool

_logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Engine(Receiver, SamplingEngine, Protocol):
    """One rollout actor. Every call has a deadline."""

    async def start(self) -> None:
        """Loads the model."""

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated: ...

    async def score_prompt(self, prompt: Prompt, adapter: str | None, num_top: int) -> PromptScores: ...

    async def serve(self, adapter: str, folder: Path) -> None:
        """Loads an adapter. Raises: ValueError: the engine cannot serve it."""

    async def withdraw(self, adapter: str) -> None:
        """Unloads an adapter after its running calls. Raises: ValueError: it is not served."""

    async def is_alive(self) -> Vitals | None:
        """Returns the resource usage of the process. Answers at any time, also during a computation."""

    async def probe(self) -> None:
        """Samples one token with the engine."""

    async def close(self) -> None:
        """Ends the process and releases its resources, in any state."""


@dataclass(eq=False)
class _Member:
    """One engine of the pool, from the start of its process to the end. A restarted worker has a new member."""

    engine: Engine
    version: int = -1  # of its weights
    num_failures_in_a_row: int = 0
    num_pushes: int = 0  # begun while it served
    last_sign_s: float = 0.0
    death: errors.EngineDiedError | None = None  # why it was lost, if its engine core ended
    in_flight: dict[object, Prompt] = field(default_factory=dict)  # by call


@dataclass(frozen=True)
class HealthChecks:
    """Settings of the health checks. An engine that finished a group since the last check is healthy. Other engines
    have to sample a token."""

    interval_s: float
    probe_interval_s: float
    max_failures_in_a_row: int  # failed groups in a row after which an engine is replaced
    no_worker_s: float  # how long a prompt waits for a serving engine


class RolloutPool:
    """Implements `mobula.cluster.roles.Rollouts`, `weight_sync.Members` and `workers.status.Scalable`."""

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Engine]],
        num_workers: int,
        *,
        release: Callable[[int], Awaitable[None]],
        policy: RestartPolicy,
        health: HealthChecks,
        on_lost: Callable[[str], None],
        on_excluded: Callable[[Prompt, errors.ExcludedPromptError], None] = lambda prompt, error: None,
    ) -> None:
        """`spawn(index)` starts the process of one engine, `release(index)` releases its resources. `on_lost` gets the
        kind of each loss, `on_excluded` each prompt that crashed several engines."""

        async def start(index: int) -> _Member:
            member = _Member(await spawn(index))
            self._of_engine[member.engine] = member
            return member

        async def stop(index: int, member: _Member) -> None:
            del self._of_engine[member.engine]
            await member.engine.close()

        self._of_engine: dict[Receiver, _Member] = {}  # of running processes
        self._pool: WorkerPool[_Member] = WorkerPool(
            "rollout",
            [None] * num_workers,
            Hooks(
                start=start,
                join=self._join,
                check=self._check,
                stop=stop,
                release=release,
                on_lost=self._note_loss,
                on_change=self._notify,
            ),
            restarts=policy,
            work="prompts",
        )
        self._health = health
        self._on_lost = on_lost
        self._admit: Callable[[Engine], Awaitable[int]] | None = None
        self._starting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self._has_started = False
        self._is_tended = False
        self._changed = asyncio.Event()  # set, and replaced, whenever an engine changes
        self._version = -1  # of the last completed push
        self._announced = -1  # of the last push that was begun
        self._suspects = Suspects(on_excluded)
        self._fatal: errors.WorkerDiedError | None = None  # ends the run

    def admit_with(self, admit: Callable[[Engine], Awaitable[int]]) -> None:
        """Sets the function that gives weights to a late joiner: `WeightSync.admit`."""
        self._admit = admit

    def start_within(self, starting: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Sets the context in which later engines start and join: `GpuLease.starting`."""
        self._starting = starting

    async def start(self) -> None:
        """Starts the first engines concurrently. They serve the weights that they loaded at start-up."""
        await self._pool.start()
        self._has_started = True

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Checks the engines while the body runs, and allows to scale them."""
        async with background_tasks() as tasks:
            tasks.create_task(self._watch(), name="watch the rollout actors")
            tasks.create_task(self._end_run(), name="end the run if no rollout actor is left")
            self._is_tended = True
            try:
                yield
            finally:
                self._is_tended = False
                await self._pool.stop_restarts()

    async def close(self) -> None:
        """Ends every engine. An error of one is logged and does not affect the others."""
        await self._pool.close()

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """Samples a prompt on the engine with the fewest prompts in flight."""
        return await self._on_an_engine(prompt, lambda engine: engine.generate(prompt, settings))

    async def score_prompt(self, prompt: Prompt, adapter: str | None, num_top: int) -> PromptScores:
        """Scores a prompt with the weights of a served adapter, or of the base model; raises as `generate`."""
        return await self._on_an_engine(prompt, lambda engine: engine.score_prompt(prompt, adapter, num_top))

    async def _on_an_engine(self, prompt: Prompt, call: Callable[[Engine], Awaitable[Result]]) -> Result:
        async with self._suspects.admitted(prompt):
            ready = await self._ready(f"prompt {prompt.prompt_id}")
            worker = min(ready, key=lambda worker: worker.load)
            member, key = worker.process, object()
            member.in_flight[key] = prompt
            worker.load += 1
            try:
                return await self._watched(member, call(member.engine))
            finally:
                del member.in_flight[key]
                self._pool.end_work(worker)

    async def _watched(self, member: _Member, call: Awaitable[Result]) -> Result:
        try:
            result = await call
        except (errors.WorkerDiedError, errors.EngineDiedError) as error:
            self._pool.lose(member, error)
            # A dying engine may be killed before it has answered all prompts: report the cause, not the lost process.
            raise member.death or error from None
        except errors.DeadlineError as error:
            raise await self._missed(member, error) from None
        except errors.MobulaError as error:
            self._failed(member, error)
            raise
        member.num_failures_in_a_row = 0
        member.last_sign_s = asyncio.get_running_loop().time()
        return result

    def receivers(self) -> list[Engine]:
        """Returns the engines that pushes update."""
        return [worker.process.engine for worker in self._pool.serving]

    def engines_of(self, version: int) -> list[Engine]:
        """Returns the engines that serve `version`, or will after its push; none unless it is the newest announced."""
        return self.receivers() if version == self._announced else []

    def synced(self, receiver: Receiver, version: int) -> None:
        if (member := self._of_engine.get(receiver)) is not None:
            member.version = version
            member.last_sign_s = asyncio.get_running_loop().time()
            self._notify()

    def announced(self, version: int) -> None:
        self._announced = version
        for worker in self._pool.serving:
            worker.process.num_pushes += 1

    def published(self, version: int) -> None:
        self._version = version
        self._notify()

    def lose(self, receiver: Receiver, error: Exception) -> None:
        if (member := self._of_engine.get(receiver)) is not None:
            self._pool.lose(member, error)

    def status(self) -> list[WorkerStatus]:
        return [
            replace(worker.status(), version=worker.handle.version)
            if worker.handle and worker.state is WorkerState.SERVING
            else worker.status()
            for worker in self._pool.workers
        ]

    async def scale(self, num_workers: int) -> None:
        """Sets the target number of engines: new engines join in the background, surplus engines drain."""
        if not self._is_tended:
            raise ValueError("the run has not begun or is over: scale it while it trains")
        await self._pool.scale(num_workers)

    async def wait_for_an_engine(self, what: str) -> None:
        """Waits until an engine serves. Raises: DeadlineError: none did in time; the message names `what`."""
        await self._ready(what)

    async def _ready(self, what: str) -> list[Worker[_Member]]:
        """Returns the engines at the published version; waits until there is one."""
        try:
            async with asyncio.timeout(self._health.no_worker_s):
                # Engines that missed the last push are skipped: their weights are too old.
                while not (ready := [w for w in self._pool.serving if w.process.version >= self._version]):
                    await self._changed.wait()
        except TimeoutError as error:
            states = ", ".join(f"{worker.name} {worker.state}" for worker in self.status())
            raise errors.DeadlineError(
                f"{what} waited {self._health.no_worker_s:g} s for a rollout actor: {states}"
            ) from error
        return ready

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _failed(self, member: _Member, error: errors.MobulaError) -> None:
        member.num_failures_in_a_row += 1
        if member.num_failures_in_a_row >= self._health.max_failures_in_a_row:
            self._pool.lose(member, error)

    async def _missed(self, member: _Member, error: errors.DeadlineError) -> errors.MobulaError:
        """Returns the error of a prompt that was not answered in time. An engine that cannot sample a token is lost."""
        try:
            await member.engine.probe()
        except Exception as probe_error:  # a healthy engine raises nothing here
            self._pool.lose(member, probe_error)
            return error
        lost = errors.LostReplyError(
            f"{error}: the worker is healthy, but its reply was lost or takes longer than timeouts.rollout_s"
        )
        self._failed(member, lost)
        return lost

    def _note_loss(self, worker: Worker[_Member], error: Exception) -> None:
        self._on_lost(f"rollout_{errors.loss_kind(error)}")
        if worker.state is WorkerState.SERVING:
            member = worker.process
            member.death = error if isinstance(error, errors.EngineDiedError) else None
            in_flight = {prompt.prompt_id: prompt for prompt in member.in_flight.values()}
            self._fatal = self._fatal or self._suspects.engine_died(error, member.num_pushes, in_flight)

    async def _join(self, name: str, member: _Member) -> None:
        async with self._starting():
            await member.engine.start()
            if self._has_started:
                assert self._admit is not None, "admit_with() sets how a joiner gets weights"
                while (version := await self._admit(member.engine)) < max(self._version, self._announced):
                    pass  # a push without this engine began in the meantime: fetch again
            else:
                version = await member.engine.weight_version()
        member.version = version
        member.last_sign_s = asyncio.get_running_loop().time()
        _logger.info("%s joins with version %d of the weights", name, version)

    async def _check(self, name: str, member: _Member) -> Vitals | None:
        vitals = await member.engine.is_alive()
        if asyncio.get_running_loop().time() - member.last_sign_s > self._health.probe_interval_s:
            await member.engine.probe()
            member.last_sign_s = asyncio.get_running_loop().time()
        return vitals

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._health.interval_s)
            await self._pool.check()

    async def _end_run(self) -> None:
        while (error := self._fatal or self._pool.exhausted()) is None:
            await self._changed.wait()
        raise error
