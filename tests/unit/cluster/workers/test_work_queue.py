"""Work goes to the workers of a pool in order; lost workers are replaced, and the pool grows and shrinks under load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fakes import AT_ONCE, FakeHosts, LocalHandle, never, settle

from mobula.cluster.errors import DeadlineError, LostReplyError, PlacementError, WorkerDiedError
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.workers.status import RestartPolicy, WorkerState
from mobula.cluster.workers.work_queue import WorkerSlot, WorkQueue

SERVING, DRAINING, QUARANTINED = WorkerState.SERVING, WorkerState.DRAINING, WorkerState.QUARANTINED
DIED = WorkerDiedError("its process ended")
VITALS = Vitals("10.0.0.1", 7, 2**20, 0.5)


async def join(name: str, handle: Any) -> None:
    """Every new worker serves at once."""


def new_worker(index: int) -> str:
    return f"new {index}"


class Team:
    """A queue whose first workers are "old 0", "old 1", ...; what was lost is in `lost`."""

    def __init__(
        self,
        num_workers: int,
        *,
        start: Callable[[int], Any] = new_worker,
        join: Any = join,
        restarts: RestartPolicy = AT_ONCE,
        max_load: int = 2,
        may_pile_up: Callable[[], bool] = lambda: True,
        first: list[Any] | None = None,
    ) -> None:
        self.hosts = FakeHosts(start, booked=num_workers)
        self.lost: list[Exception] = []
        self.queue = WorkQueue(
            "judge", first or [f"old {index}" for index in range(num_workers)], self.hosts, max_load=max_load,
            restarts=restarts, alive_s=0.05, join=join, on_lost=self.lost.append, may_pile_up=may_pile_up,
        )  # fmt: skip

    def states(self) -> dict[str, WorkerState]:
        return {worker.name: worker.state for worker in self.queue.pool.status()}

    def work(self, *, is_urgent: bool = False) -> Work:
        return Work(self.queue, is_urgent)


class Work:
    """A piece of work that lasts until it is finished, and remembers where it was done."""

    def __init__(self, queue: WorkQueue, is_urgent: bool) -> None:
        self.slot: WorkerSlot | None = None
        self._done = asyncio.Event()
        self.task = asyncio.create_task(self._run(queue, is_urgent))

    async def _run(self, queue: WorkQueue, is_urgent: bool) -> None:
        async with queue.slot(is_urgent=is_urgent) as self.slot:
            await self._done.wait()

    async def finish(self) -> None:
        self._done.set()
        await self.task
        await settle()

    @property
    def handle(self) -> Any:
        return self.slot.handle if self.slot else None


async def test_work_goes_to_the_least_loaded_worker_and_then_waits_in_line() -> None:
    team = Team(2)
    works = [team.work() for _ in range(6)]
    await settle()
    assert [work.handle for work in works] == ["old 0", "old 1", "old 0", "old 1", None, None]
    await works[1].finish()
    assert [work.handle for work in works[4:]] == ["old 1", None]


async def test_work_piles_up_at_a_worker_only_where_it_may() -> None:
    is_much = False
    team = Team(1, may_pile_up=lambda: is_much)
    works = [team.work() for _ in range(3)]
    await settle()
    assert [work.handle for work in works] == ["old 0", None, None]
    is_much = True
    team.queue.dispatch()
    await settle()
    assert [work.handle for work in works] == ["old 0", "old 0", None]


async def test_urgent_work_goes_before_those_who_wait() -> None:
    team = Team(1, max_load=1)
    first, patient, urgent = team.work(), team.work(), team.work(is_urgent=True)
    await settle()
    await first.finish()
    assert (patient.handle, urgent.handle) == (None, "old 0")


async def test_work_that_is_cancelled_gives_its_place_to_the_next() -> None:
    team = Team(1, max_load=1)
    first, second, third = team.work(), team.work(), team.work()
    await settle()
    first.task.cancel()
    second.task.cancel()  # in the moment in which it is promised the place
    await settle()
    assert third.handle == "old 0"
    assert [worker.num_in_flight for worker in team.queue.pool.status()] == [1]


async def test_a_lost_worker_gets_no_more_work() -> None:
    waiting = asyncio.Event()

    async def slow(name: str, handle: Any) -> None:
        await waiting.wait()

    team = Team(2, join=slow)
    first = team.work()
    await settle()
    team.queue.lose(first.slot, DIED)
    await settle()
    assert team.states() == {"judge/0": WorkerState.JOINING, "judge/1": SERVING}
    later = [team.work() for _ in range(3)]
    await settle()
    assert [work.handle for work in later] == ["old 1", "old 1", None]
    waiting.set()
    await settle()
    assert later[2].handle == "new 0"


async def test_work_does_not_wait_for_a_pool_that_is_gone() -> None:
    def fail(index: int) -> Any:
        raise PlacementError("no room")

    team = Team(1, start=fail, max_load=1)
    work, waiting = team.work(), team.work()
    await settle()
    team.queue.lose(work.slot, DIED)
    with pytest.raises(WorkerDiedError, match=r"every judge worker is lost.*judge/0: error: PlacementError: no room"):
        await waiting.task
    with pytest.raises(WorkerDiedError, match="resume=auto"):
        async with team.queue.slot():
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
    team, late = Team(3, first=workers), DeadlineError("waited 5 s for an answer")
    works = [team.work() for _ in workers]
    await settle()
    errors = [await team.queue.failed(work.slot, late) for work in works]
    await settle()
    assert errors[1:] == [late, late]
    assert isinstance(errors[0], LostReplyError) and str(errors[0]).startswith(f"{late}: the worker is healthy")
    assert team.queue.handles == (workers[0], "new 1", "new 2")
    assert team.lost == [late, DIED]


async def test_a_worker_that_gives_no_sign_of_life_is_replaced() -> None:
    class Alive:
        def is_alive(self) -> Vitals:
            return VITALS

    class Silent:
        is_alive = staticmethod(never)

    team = Team(2, first=[LocalHandle(Alive()), LocalHandle(Silent())])
    healthy, _ = team.queue.handles
    await team.queue.pool.check()
    await settle()
    assert team.queue.handles == (healthy, "new 1")
    assert [worker.vitals for worker in team.queue.pool.status()] == [VITALS, None]
    assert isinstance(team.lost[0], DeadlineError) and "judge/1 to answer that it is alive" in str(team.lost[0])


async def test_new_workers_join_in_the_background_and_take_work_that_waits() -> None:
    greeted: list[str] = []

    async def join(name: str, handle: Any) -> None:
        greeted.append(f"{name} {handle}")

    team = Team(1, max_load=1, join=join)
    works = [team.work() for _ in range(3)]
    await settle()
    await team.queue.pool.scale(3)
    assert team.states() == {"judge/0": SERVING, "judge/1": WorkerState.STARTING, "judge/2": WorkerState.STARTING}
    await settle()
    assert [work.handle for work in works] == ["old 0", "new 1", "new 2"]
    assert greeted == ["judge/1 new 1", "judge/2 new 2"]
    assert team.hosts.booked == {0, 1, 2}


async def test_a_worker_that_is_scaled_away_finishes_what_it_has_and_takes_nothing_new() -> None:
    team = Team(2, max_load=2)
    works = [team.work() for _ in range(4)]
    await settle()
    await team.queue.pool.scale(1)
    assert team.states() == {"judge/0": SERVING, "judge/1": DRAINING}
    await works[1].finish()
    waiting = team.work()
    await settle()
    assert waiting.handle is None and team.states()["judge/1"] is DRAINING
    await works[3].finish()
    assert team.states() == {"judge/0": SERVING}
    assert team.hosts.stopped == [(1, "old 1")] and team.hosts.booked == {0}
    await works[0].finish()
    assert waiting.handle == "old 0"


async def test_closing_ends_every_worker_and_fails_the_waiting_calls() -> None:
    team = Team(2, max_load=1)
    works = [team.work() for _ in range(3)]
    await settle()
    await team.queue.pool.close()
    assert sorted(team.hosts.stopped) == [(0, "old 0"), (1, "old 1")]
    with pytest.raises(WorkerDiedError, match="closed: the run is over"):
        await works[2].task
    team.queue.lose(works[0].slot, DIED)
    await works[0].finish()
    assert team.queue.pool.status() == [] and team.lost == []
