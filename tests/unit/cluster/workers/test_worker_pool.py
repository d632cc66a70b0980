"""Both users of a worker pool restart lost workers, grow and shrink under load; work goes through a queue in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fakes import AT_ONCE, SETTINGS, FakeHosts, LocalHandle, make_group, make_prompt, never, settle

from mobula.cluster.errors import (
    CanaryError,
    DeadlineError,
    LostReplyError,
    PlacementError,
    PreflightError,
    WorkerDiedError,
)
from mobula.cluster.failures import Failure
from mobula.cluster.records.trajectory import Generated
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.workers.status import MAX_EQUAL, RestartPolicy, WorkerState, WorkerStatus
from mobula.cluster.workers.work_queue import WorkerSlot, WorkQueue

ROLE = "rollout"
SERVING, DRAINING, QUARANTINED = WorkerState.SERVING, WorkerState.DRAINING, WorkerState.QUARANTINED
DIED = WorkerDiedError("its process ended")
NO_CHECKS = HealthChecks(interval_s=1000, probe_interval_s=1000, max_failures_in_a_row=1, no_worker_s=5)


def new_worker(index: int) -> str:
    return f"new {index}"


async def at_once(name: str, handle: Any) -> None:
    """Every new worker serves at once."""


class QueueUser:
    """A `WorkQueue` whose first workers are "old 0", "old 1", ..."""

    def __init__(
        self,
        hosts: FakeHosts,
        num: int,
        join: Callable[..., Awaitable[None]],
        policy: RestartPolicy,
        *,
        max_load: int = 2,
        may_pile_up: Callable[[], bool] = lambda: True,
        first: list[Any] | None = None,
    ) -> None:
        self.lost: list[Any] = []
        self.queue = WorkQueue(
            ROLE, first or [f"old {index}" for index in range(num)], hosts, max_load=max_load, restarts=policy,
            alive_s=0.05, join=join, on_lost=self.lost.append, may_pile_up=may_pile_up,
        )  # fmt: skip
        self.pool, self.start = self.queue.pool, self.queue.start

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.start()
        yield

    @property
    def handles(self) -> list[Any]:
        return [worker.handle for worker in self.pool.serving]

    async def work(self, work: Work, *, is_urgent: bool = False) -> None:
        async with self.queue.slot(is_urgent=is_urgent) as work.slot:
            await work.done.wait()


class RolloutUser:
    """A `RolloutPool` whose first engines have the processes "old 0", "old 1", ..."""

    def __init__(self, hosts: FakeHosts, num: int, join: Callable[..., Awaitable[None]], policy: RestartPolicy) -> None:
        self.lost: list[Any] = []
        self.done: dict[str, asyncio.Event] = {}  # prompt id -> set once it is to be sampled
        self._hosts = hosts
        self._join = join
        self._first = [f"old {index}" for index in range(num)]
        self.pool = RolloutPool(
            self._spawn, num, release=hosts.release, policy=policy, health=NO_CHECKS, on_lost=self.lost.append
        )
        self.pool.admit_with(lambda engine: engine.weight_version())
        self.start = self.pool.start

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.start()
        async with self.pool.tended():
            yield

    @property
    def handles(self) -> list[Any]:
        return self.pool.receivers()

    async def work(self, work: Work) -> None:
        prompt = make_prompt(f"0/{len(self.done)}/s{len(self.done)}")
        self.done[prompt.prompt_id] = work.done
        await self.pool.generate(prompt, SETTINGS)

    async def _spawn(self, index: int) -> Engine:
        handle = self._first.pop(0) if self._first else await self._hosts.start(index)
        return Engine(self, index, handle, self._hosts, self._join)


class Engine:
    """An engine of a `RolloutUser`; its process is one of the hosts'."""

    def __init__(self, user: RolloutUser, index: int, handle: Any, hosts: FakeHosts, join: Any) -> None:
        self.name = f"{ROLE}/{index}"
        self._user = user
        self._join = join
        self._handle = handle
        self._stop = lambda: hosts.stop(index, handle)

    async def start(self) -> None:
        await self._join(self.name, self._handle)

    async def generate(self, prompt: Any, settings: Any) -> Generated:
        await self._user.done[prompt.prompt_id].wait()
        group = make_group(prompt)
        return Generated(group, group.summary())

    async def weight_version(self) -> int:
        return 0

    async def close(self) -> None:
        await self._stop()


class Team:
    """A user with its hosts. `join` is for workers that are not the first ones."""

    def __init__(
        self,
        user: Callable[..., QueueUser | RolloutUser],
        num_workers: int,
        *,
        start: Callable[[int], Any] = new_worker,
        join: Callable[..., Awaitable[None]] = at_once,
        restarts: RestartPolicy = AT_ONCE,
    ) -> None:
        async def join_later(name: str, handle: Any) -> None:
            if not handle.startswith("old"):
                await join(name, handle)

        self.hosts = FakeHosts(start, booked=num_workers)
        self.user = user(self.hosts, num_workers, join_later, restarts)
        self.pool = self.user.pool

    def states(self) -> list[WorkerState]:
        return [worker.state for worker in self.pool.status()]

    def work(self, **options: bool) -> Work:
        return Work(self.user, **options)


class Work:
    """A piece of work in flight until it is finished; a queue tells where it is done."""

    slot: WorkerSlot | None = None

    def __init__(self, user: QueueUser | RolloutUser, **options: bool) -> None:
        self.done = asyncio.Event()
        self.task = asyncio.create_task(user.work(self, **options))

    async def finish(self) -> None:
        self.done.set()
        await self.task
        await settle()

    @property
    def handle(self) -> Any:
        return self.slot.handle if self.slot else None


both = pytest.mark.parametrize("user", [QueueUser, RolloutUser])


def no_room(index: int) -> Any:
    raise PlacementError("no room")


@both
async def test_a_lost_worker_is_replaced_once_however_often_it_is_reported(user: Any) -> None:
    team = Team(user, 2)
    async with team.user.running():
        works = [team.work() for _ in range(4)]
        await settle()
        handle = team.user.handles[0]
        for _ in range(2):
            team.pool.lose(handle, DIED)
        await settle()
        assert team.states() == [SERVING, SERVING]
        assert team.hosts.stopped == [(0, "old 0")] and team.hosts.started == {0: 1}
        assert len(team.user.lost) == 1
        version = None if user is QueueUser else 0
        detail = "died: its process ended"
        assert team.pool.status()[0] == WorkerStatus("rollout/0", SERVING, version, 2, 1, detail)
        for work in works:
            await work.finish()
        assert [worker.num_in_flight for worker in team.pool.status()] == [0, 0]


@both
async def test_a_worker_that_is_lost_too_often_is_quarantined_and_its_place_given_back(user: Any) -> None:
    team = Team(user, 2, start=no_room)
    async with team.user.running():
        team.pool.lose(team.user.handles[0], CanaryError("off by 1"))
        await settle()
        assert team.states() == [QUARANTINED, SERVING]
        assert team.hosts.booked == {1} and team.hosts.stopped == [(0, "old 0")]
        assert team.hosts.started[0] == AT_ONCE.max_restarts
        assert team.pool.status()[0].detail == "error: PlacementError: no room"
        assert len(team.user.lost) == 1 + AT_ONCE.max_restarts
        if user is RolloutUser:
            assert team.user.lost == ["rollout_wrong", *["rollout_error"] * AT_ONCE.max_restarts]
        work = team.work()
        await work.finish()


@both
async def test_a_worker_that_fails_to_start_with_one_cause_is_not_started_again_and_again(user: Any) -> None:
    def fail(index: int) -> Any:
        raise ValueError("there is no reward function 'nope'")

    team = Team(user, 2, start=fail, restarts=replace(AT_ONCE, max_restarts=2 * MAX_EQUAL))
    async with team.user.running():
        team.pool.lose(team.user.handles[0], DIED)
        await settle()
        assert team.states() == [QUARANTINED, SERVING]
        assert team.hosts.started[0] == MAX_EQUAL
        assert "3 times in a row with one cause; error: ValueError: there is no reward" in team.pool.status()[0].detail


@pytest.mark.parametrize(
    ("user", "error", "message"),
    [
        (QueueUser, PreflightError, "^a rollout worker cannot be started: ValueError: reward function 'nope"),
        (RolloutUser, WorkerDiedError, "^its actor died while waiting for rollout/0 to start"),
    ],
)
async def test_a_first_worker_that_fails_ends_the_start(user: Any, error: type[Exception], message: str) -> None:
    async def refuse(name: str, handle: Any) -> None:
        died = WorkerDiedError(f"its actor died while waiting for {name} to start: a long text of Ray's")
        died.failure = Failure("ValueError: reward function 'nope:score' cannot be imported")
        raise died

    made = user(FakeHosts(no_room, booked=1), 1, refuse, AT_ONCE)
    with pytest.raises(error, match=message):
        await made.start()


@both
async def test_a_worker_that_dies_while_it_drains_is_lost_once_and_not_replaced(user: Any) -> None:
    team = Team(user, 2)
    async with team.user.running():
        works = [team.work() for _ in range(4)]
        await settle()
        handle = team.user.handles[1]
        await team.pool.scale(1)
        for _ in range(2):
            team.pool.lose(handle, DIED)
        assert team.states() == [SERVING, DRAINING]
        for work in works:
            await work.finish()
        assert team.states() == [SERVING]
        assert team.hosts.started == {} and team.hosts.booked == {0}
        assert len(team.user.lost) == 1


@both
async def test_a_worker_that_is_scaled_away_before_it_serves_leaves_when_it_has_started(user: Any) -> None:
    waiting = asyncio.Event()

    async def slow(name: str, handle: Any) -> None:
        await waiting.wait()

    team = Team(user, 1, join=slow)
    async with team.user.running():
        await team.pool.scale(2)
        await settle()
        await team.pool.scale(1)
        assert team.states() == [SERVING, DRAINING]
        waiting.set()
        await settle()
        assert team.states() == [SERVING]
        assert team.hosts.stopped == [(1, "new 1")] and team.hosts.booked == {0}
        assert team.user.lost == []


@both
async def test_a_worker_that_is_scaled_away_does_not_wait_for_its_restart(user: Any) -> None:
    team = Team(user, 2, restarts=replace(AT_ONCE, backoff_s=1000, max_backoff_s=1000))
    async with team.user.running():
        team.pool.lose(team.user.handles[1], DIED)
        await settle()
        assert team.states() == [SERVING, WorkerState.WAITING]
        await team.pool.scale(1)
        await settle()
        assert team.states() == [SERVING]
        assert team.hosts.started == {} and team.hosts.booked == {0}


@both
async def test_an_index_is_not_given_again_before_its_place_is_free(user: Any) -> None:
    team = Team(user, 2)
    async with team.user.running():
        works = [team.work() for _ in range(2)]
        await settle()
        await team.pool.scale(1)
        await team.pool.scale(2)
        assert [worker.name for worker in team.pool.status()] == ["rollout/0", "rollout/1", "rollout/2"]
        assert team.states()[1] is DRAINING and team.hosts.stopped == [], "it finishes what it has"
        for work in works:
            await work.finish()
        names = {worker.name: worker.state for worker in team.pool.status()}
        assert names == {"rollout/0": SERVING, "rollout/2": SERVING}
        assert team.hosts.stopped == [(1, "old 1")] and team.user.lost == []
        await team.pool.scale(3)
        await settle()
        assert team.states() == [SERVING] * 3 and team.hosts.started == {1: 1, 2: 1}


@both
async def test_scaling_replaces_those_in_quarantine(user: Any) -> None:
    is_full = [True]

    def start(index: int) -> str:
        return no_room(index) if is_full else f"new {index}"

    team = Team(user, 2, start=start)
    async with team.user.running():
        team.pool.lose(team.user.handles[0], DIED)
        await settle()
        assert team.states() == [QUARANTINED, SERVING]
        is_full.clear()
        await team.pool.scale(2)
        await settle()
        assert team.states() == [SERVING, SERVING]
        assert team.hosts.booked == {0, 1}


@both
async def test_an_unexpected_error_of_the_pool_is_in_the_status(user: Any, caplog: pytest.LogCaptureFixture) -> None:
    class BrokenHosts(FakeHosts):
        async def release(self, index: int) -> None:
            raise RuntimeError("no such placement group")

    made = user(BrokenHosts(no_room, booked=2), 2, at_once, replace(AT_ONCE, max_restarts=0))
    async with made.running():
        made.pool.lose(made.handles[0], DIED)
        await settle()
        worker = made.pool.status()[0]
        assert (worker.state, worker.detail) == (QUARANTINED, "error: no such placement group")
        assert len(made.lost) == 2
        assert "rollout/0 cannot be restarted or removed" in caplog.text


@both
@pytest.mark.parametrize("num_workers", [0, -1])
async def test_a_pool_without_workers_is_refused(user: Any, num_workers: int) -> None:
    team = Team(user, 1)
    async with team.user.running():
        with pytest.raises(ValueError, match=f"rollout={num_workers}: a run with this role needs at least one"):
            await team.pool.scale(num_workers)
    with pytest.raises(ValueError, match=r"resources\.rollout\.num_workers"):
        Team(user, 0)


@both
async def test_closing_ends_every_worker_and_does_not_wait_for_one_that_starts(user: Any) -> None:
    async def stuck(name: str, handle: Any) -> None:
        await never()

    team = Team(user, 1, join=stuck)
    async with team.user.running():
        await team.pool.scale(2)
        await settle()
    await team.pool.close()
    assert sorted(team.hosts.stopped) == [(0, "old 0"), (1, "new 1")]
    assert team.pool.status() == []


# Work in line for a queue: who gets it, what fails with its worker, and what joins and leaves meanwhile.

VITALS = Vitals("10.0.0.1", 7, 2**20, 0.5)


def queue_team(num_workers: int, *, start: Any = new_worker, join: Any = at_once, **options: Any) -> Team:
    return Team(partial(QueueUser, **options), num_workers, start=start, join=join)


async def test_work_goes_to_the_least_loaded_worker_and_then_waits_in_line() -> None:
    team = queue_team(2)
    works = [team.work() for _ in range(6)]
    await settle()
    assert [work.handle for work in works] == ["old 0", "old 1", "old 0", "old 1", None, None]
    await works[1].finish()
    assert [work.handle for work in works[4:]] == ["old 1", None]


async def test_work_piles_up_at_a_worker_only_where_it_may() -> None:
    is_much = False
    team = queue_team(1, may_pile_up=lambda: is_much)
    works = [team.work() for _ in range(3)]
    await settle()
    assert [work.handle for work in works] == ["old 0", None, None]
    is_much = True
    team.user.queue.dispatch()
    await settle()
    assert [work.handle for work in works] == ["old 0", "old 0", None]


async def test_urgent_work_goes_before_those_who_wait() -> None:
    team = queue_team(1, max_load=1)
    first, patient, urgent = team.work(), team.work(), team.work(is_urgent=True)
    await settle()
    await first.finish()
    assert (patient.handle, urgent.handle) == (None, "old 0")


async def test_work_that_is_cancelled_gives_its_place_to_the_next() -> None:
    team = queue_team(1, max_load=1)
    first, second, third = team.work(), team.work(), team.work()
    await settle()
    first.task.cancel()
    second.task.cancel()  # in the moment in which it is promised the place
    await settle()
    assert third.handle == "old 0"
    assert [worker.num_in_flight for worker in team.pool.status()] == [1]


async def test_a_lost_worker_gets_no_more_work() -> None:
    waiting = asyncio.Event()

    async def slow(name: str, handle: Any) -> None:
        await waiting.wait()

    team = queue_team(2, join=slow)
    first = team.work()
    await settle()
    team.user.queue.lose(first.slot, DIED)
    await settle()
    assert team.states() == [WorkerState.JOINING, SERVING]
    later = [team.work() for _ in range(3)]
    await settle()
    assert [work.handle for work in later] == ["old 1", "old 1", None]
    waiting.set()
    await settle()
    assert later[2].handle == "new 0"


async def test_work_does_not_wait_for_a_pool_that_is_gone() -> None:
    team = queue_team(1, start=no_room, max_load=1)
    work, waiting = team.work(), team.work()
    await settle()
    team.user.queue.lose(work.slot, DIED)
    message = r"every rollout worker is lost.*rollout/0: error: PlacementError: no room"
    with pytest.raises(WorkerDiedError, match=message):
        await waiting.task
    with pytest.raises(WorkerDiedError, match="resume=auto"):
        async with team.user.queue.slot():
            pass


async def test_a_worker_that_misses_a_deadline_is_replaced_unless_it_is_free() -> None:
    class Free:
        def ping(self) -> bool:
            return True

    class Busy:
        ping = staticmethod(never)

    class Gone:
        def ping(self) -> bool:
            raise DIED

    workers = [LocalHandle(role()) for role in (Free, Busy, Gone)]
    team, late = queue_team(3, first=workers), DeadlineError("waited 5 s for an answer")
    works = [team.work() for _ in workers]
    await settle()
    errors = [await team.user.queue.failed(work.slot, late) for work in works]
    await settle()
    assert errors[1:] == [late, late]
    assert isinstance(errors[0], LostReplyError) and str(errors[0]).startswith(f"{late}: the worker is healthy")
    assert team.user.queue.handles == (workers[0], "new 1", "new 2")
    assert team.user.lost == [late, DIED]


async def test_a_worker_that_gives_no_sign_of_life_is_replaced() -> None:
    class Alive:
        def is_alive(self) -> Vitals:
            return VITALS

    class Silent:
        is_alive = staticmethod(never)

    team = queue_team(2, first=[LocalHandle(Alive()), LocalHandle(Silent())])
    healthy, _ = team.user.queue.handles
    await team.pool.check()
    await settle()
    assert team.user.queue.handles == (healthy, "new 1")
    assert [worker.vitals for worker in team.pool.status()] == [VITALS, None]
    assert isinstance(team.user.lost[0], DeadlineError) and "rollout/1 to answer that it is alive" in str(
        team.user.lost[0]
    )


async def test_new_workers_join_in_the_background_and_take_work_that_waits() -> None:
    greeted: list[str] = []

    async def join(name: str, handle: Any) -> None:
        greeted.append(f"{name} {handle}")

    team = queue_team(1, max_load=1, join=join)
    works = [team.work() for _ in range(3)]
    await settle()
    await team.pool.scale(3)
    assert team.states() == [SERVING, WorkerState.STARTING, WorkerState.STARTING]
    await settle()
    assert [work.handle for work in works] == ["old 0", "new 1", "new 2"]
    assert greeted == ["rollout/1 new 1", "rollout/2 new 2"]
    assert team.hosts.booked == {0, 1, 2}


async def test_a_worker_that_is_scaled_away_finishes_what_it_has_and_takes_nothing_new() -> None:
    team = queue_team(2, max_load=2)
    works = [team.work() for _ in range(4)]
    await settle()
    await team.pool.scale(1)
    assert team.states() == [SERVING, DRAINING]
    await works[1].finish()
    waiting = team.work()
    await settle()
    assert waiting.handle is None and team.states() == [SERVING, DRAINING]
    await works[3].finish()
    assert team.states() == [SERVING]
    assert team.hosts.stopped == [(1, "old 1")] and team.hosts.booked == {0}
    await works[0].finish()
    assert waiting.handle == "old 0"


async def test_closing_ends_every_worker_and_fails_the_waiting_calls() -> None:
    team = queue_team(2, max_load=1)
    works = [team.work() for _ in range(3)]
    await settle()
    await team.pool.close()
    assert sorted(team.hosts.stopped) == [(0, "old 0"), (1, "old 1")]
    with pytest.raises(WorkerDiedError, match="closed: the run is over"):
        await works[2].task
    team.user.queue.lose(works[0].slot, DIED)
    await works[0].finish()
    assert team.pool.status() == [] and team.user.lost == []
