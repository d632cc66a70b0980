"""The reward pool's bookkeeping over fake workers: load, retries, replacement, failure policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from crews import AT_ONCE, FakeHosts, settle
from ray.exceptions import ActorDiedError

from cluster.errors import RewardError
from cluster.trajectory import Reward
from rewards.contract import FailureKind
from rewards.pool import RewardPool
from rewards.worker import GroupScore, ScoringFailure


class FakeCall:
    """What `handle.method.remote(...)` returns: something with a future."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class FakePing:
    """`handle.ping`: answers at once."""

    def remote(self) -> FakeCall:
        future: Future[Any] = Future()
        future.set_result(True)
        return FakeCall(future)


class FakeWorker:
    """A handle whose `score` answers when told to, or at once with `reply(group)`."""

    def __init__(self, reply: Callable[[Any], Any] | None = None) -> None:
        self.calls: list[tuple[Any, Future[Any]]] = []
        self._reply = reply
        self.score = self
        self.ping = FakePing()

    def remote(self, groups: list[Any]) -> FakeCall:
        future: Future[Any] = Future()
        self.calls.append((groups[0], future))
        if self._reply is not None:
            result = self._reply(groups[0])
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result([result])
        return FakeCall(future)

    def finish(self, index: int) -> None:
        self.calls[index][1].set_result([scored(self.calls[index][0])])


def scored(group: Any) -> GroupScore:
    return GroupScore((Reward(float(group)),), ())


def dead(_: Any) -> Exception:
    return ActorDiedError()


def no_worker(index: int) -> Any:
    raise AssertionError(f"worker {index} was replaced")


def make_pool(workers: list[FakeWorker], *, start: Callable[[int], Any] = no_worker, **changes: Any) -> RewardPool:
    settings = {
        "hosts": FakeHosts(start, booked=len(workers)),
        "restarts": AT_ONCE,
        "start_s": 5.0,
        "alive_s": 5.0,
        "timeout_s": 5.0,
        "max_in_flight": 1,
        "max_attempts": 3,
        "on_failure": "exclude",
    }
    return RewardPool(workers, **{**settings, **changes})


async def test_groups_go_to_the_least_loaded_worker_and_wait_beyond_the_bound() -> None:
    workers = [FakeWorker(), FakeWorker()]
    pool = make_pool(workers, max_in_flight=2)
    tasks = [asyncio.create_task(pool.score(i)) for i in range(6)]
    await settle()
    assert [[call[0] for call in w.calls] for w in workers] == [[0, 2], [1, 3]]
    workers[1].finish(0)
    await settle()
    assert [call[0] for call in workers[1].calls] == [1, 3, 4]
    workers[0].finish(0), workers[0].finish(1), workers[1].finish(1), workers[1].finish(2)
    await settle()
    workers[0].finish(2)
    assert [rewards[0].value for rewards in await asyncio.gather(*tasks)] == [0, 1, 2, 3, 4, 5]


async def test_a_dead_worker_is_replaced_once_and_its_groups_are_scored_by_another() -> None:
    doomed, healthy = FakeWorker(), FakeWorker(scored)
    hosts = FakeHosts(lambda index: FakeWorker(scored), booked=2)
    pool = make_pool([doomed, healthy], hosts=hosts, max_in_flight=4)
    tasks = [asyncio.create_task(pool.score(i)) for i in range(8)]
    await settle()
    for _, future in doomed.calls:
        future.set_exception(ActorDiedError())
    assert [rewards[0].value for rewards in await asyncio.gather(*tasks)] == list(range(8))
    await settle()
    assert hosts.stopped == [(0, doomed)]
    assert doomed not in pool.workers and pool.workers[1] is healthy
    assert +pool.failures == {FailureKind.WORKER_DIED: 1}


async def test_a_worker_that_does_not_answer_is_replaced() -> None:
    pool = make_pool([FakeWorker()], start=lambda index: FakeWorker(scored), timeout_s=0.05)
    assert (await pool.score(3))[0].value == 3.0
    assert +pool.failures == {FailureKind.WORKER_HUNG: 1}


async def test_a_group_that_kills_every_worker_ends_in_an_error_not_in_a_loop() -> None:
    pool = make_pool([FakeWorker(dead)], start=lambda index: FakeWorker(dead), max_attempts=3)
    with pytest.raises(RewardError, match="3 reward workers were lost"):
        await pool.score(0)
    assert pool.failures[FailureKind.WORKER_DIED] == 3


async def test_a_worker_that_cannot_start_is_counted_and_tried_again() -> None:
    starts = iter([RuntimeError("no memory"), FakeWorker(scored)])

    def start(index: int) -> FakeWorker:
        worker = next(starts)
        if isinstance(worker, Exception):
            raise worker
        return worker

    pool = make_pool([FakeWorker(dead)], start=start)
    assert (await pool.score(1))[0].value == 1.0
    assert pool.failures[FailureKind.WORKER_DIED] == 2


async def test_the_pool_grows_and_shrinks_while_it_scores() -> None:
    newcomers: list[FakeWorker] = []

    def start(index: int) -> FakeWorker:
        newcomers.append(FakeWorker())
        return newcomers[-1]

    first = FakeWorker()
    pool = make_pool([first], start=start)
    tasks = [asyncio.create_task(pool.score(i)) for i in range(3)]
    await settle()
    await pool.scale(2)
    await settle()
    assert [call[0] for call in newcomers[0].calls] == [1]
    await pool.scale(1)
    first.finish(0)
    await settle()
    assert [call[0] for call in first.calls] == [0, 2], "who leaves takes nothing new"
    newcomers[0].finish(0), first.finish(1)
    assert [rewards[0].value for rewards in await asyncio.gather(*tasks)] == [0, 1, 2]
    await settle()
    assert [worker.name for worker in pool.status()] == ["reward/0"]


def half_failed(_: Any) -> GroupScore:
    failures = (
        ScoringFailure("p#1", "accuracy", FailureKind.TIMED_OUT, "waited 1 s"),
        ScoringFailure("p#2", "accuracy", FailureKind.NOT_FINITE, "returned nan"),
    )
    return GroupScore((Reward(1.0), None, None), failures)


async def test_unscored_responses_are_excluded_and_counted_by_kind() -> None:
    pool = make_pool([FakeWorker(half_failed)])
    assert await pool.score(0) == (Reward(1.0), None, None)
    await pool.score(0)
    assert pool.failures == {"timed_out": 2, "not_finite": 2, "failed": 0, "worker_died": 0, "worker_hung": 0}


async def test_on_failure_stop_names_the_component_and_the_next_action() -> None:
    pool = make_pool([FakeWorker(half_failed)], on_failure="stop")
    with pytest.raises(RewardError, match=r"p#1: .*'accuracy' timed_out .*rewards.on_failure=exclude"):
        await pool.score(0)
    assert pool.failures["timed_out"] == 1


async def test_an_error_of_the_group_itself_travels_and_frees_the_place() -> None:
    pool = make_pool([FakeWorker(lambda group: RewardError("no such object") if group == 0 else scored(group))])
    with pytest.raises(RewardError, match="no such object"):
        await pool.score(0)
    assert (await pool.score(1))[0].value == 1.0


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="resources.reward.num_workers"):
        make_pool([])
