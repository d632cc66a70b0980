"""The reward pool's bookkeeping over fake workers: load, retries, replacement, failure policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from hosts import AT_ONCE, FakeHosts, settle
from ray import TaskID
from ray.exceptions import ActorDiedError
from reward_data import component, component_of, pool_over, rewards_of

from mobula.cluster.errors import (
    DeadlineError,
    EngineLostError,
    RewardError,
    StuckError,
    UnscoredGroupError,
    WorkerDiedError,
)
from mobula.cluster.failures import Failure
from mobula.cluster.records.trajectory import Reward
from mobula.configs.schema import Gate, Recipe
from mobula.rewards.contract import FailureKind, Outcome, Score, ScoringFailure
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool
from mobula.rewards.pool.service import RewardService
from mobula.rewards.pool.worker import GroupOutcomes, Question


class FakeCall:
    """What `handle.method.remote(...)` returns: something with a future and the id of its call."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future

    def task_id(self) -> TaskID:
        return TaskID.nil()


class FakePing:
    """`handle.ping`: answers at once, or never where the worker hangs."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs

    def remote(self) -> FakeCall:
        future: Future[Any] = Future()
        if not self._hangs:
            future.set_result(True)
        return FakeCall(future)


class FakeWorker:
    """A handle whose `score` answers on `finish`, or at once with `reply(group)`; one that hangs is never free."""

    def __init__(self, reply: Callable[[Any], Any] | None = None, *, hangs: bool = False) -> None:
        self.calls: list[tuple[Any, Future[Any]]] = []
        self._reply = reply
        self.score = self
        self.ping = FakePing(hangs)

    def remote(self, questions: list[Question]) -> FakeCall:
        future: Future[Any] = Future()
        groups = [question.group for question in questions]
        self.calls.append((groups[0] if len(groups) == 1 else groups, future))
        self.earlier = [question.earlier for question in questions]
        if self._reply is not None:
            results = [self._reply(group) for group in groups]
            failed = next((result for result in results if isinstance(result, Exception)), None)
            if failed is not None:
                future.set_exception(failed)
            else:
                future.set_result(results)
        return FakeCall(future)

    def finish(self, index: int) -> None:
        groups = self.calls[index][0]
        self.calls[index][1].set_result([scored(group) for group in (groups if isinstance(groups, list) else [groups])])


def scored(group: Any) -> GroupOutcomes:
    return outcomes_of({"accuracy": Score(float(group))})


def outcomes_of(*outcomes: Mapping[str, Outcome], label: str = "default") -> GroupOutcomes:
    return GroupOutcomes(label, tuple(f"p#{i}" for i in range(len(outcomes))), outcomes)


def dead(_: Any) -> Exception:
    return ActorDiedError()


def no_worker(index: int) -> Any:
    raise AssertionError(f"worker {index} was replaced")


def make_pool(
    workers: list[FakeWorker],
    *,
    start: Callable[[int], Any] = no_worker,
    hosts: FakeHosts | None = None,
    on_failure: str = "exclude",
    **settings: Any,
) -> RewardPool:
    found = hosts or FakeHosts(start, booked=len(workers))
    config = rewards_of(component("accuracy", "exact_match"), on_failure=on_failure)
    return pool_over(config, workers, hosts=found, restarts=AT_ONCE, **settings)


def service(pool: RewardPool) -> RewardService:
    return pool.services["reward"]


async def test_groups_go_to_the_least_loaded_worker_and_wait_beyond_the_bound() -> None:
    workers = [FakeWorker(), FakeWorker()]
    pool = make_pool(workers, max_in_flight=2)
    tasks = [asyncio.create_task(pool.score(i, "a group")) for i in range(6)]
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
    tasks = [asyncio.create_task(pool.score(i, "a group")) for i in range(8)]
    await settle()
    for _, future in doomed.calls:
        future.set_exception(ActorDiedError())
    assert [rewards[0].value for rewards in await asyncio.gather(*tasks)] == list(range(8))
    await settle()
    assert hosts.stopped == [(0, doomed)]
    assert doomed not in service(pool).workers and service(pool).workers[1] is healthy
    assert +pool.failures == {FailureKind.WORKER_DIED: 1}


async def test_a_worker_that_does_not_answer_is_replaced() -> None:
    pool = make_pool([FakeWorker(hangs=True)], start=lambda index: FakeWorker(scored), timeout_s=0.05, alive_s=0.05)
    assert (await pool.score(3, "a group"))[0].value == 3.0
    assert +pool.failures == {FailureKind.WORKER_HUNG: 1}


async def test_a_worker_that_loses_a_reply_is_not_replaced() -> None:
    class Forgetful(FakeWorker):
        def remote(self, questions: list[Question]) -> FakeCall:
            call = super().remote(questions)
            if len(self.calls) > 1:
                self.finish(-1)
            return call

    pool = make_pool([Forgetful()], timeout_s=0.05)
    assert (await pool.score(3, "a group"))[0].value == 3.0
    assert +pool.failures == {FailureKind.REPLY_LOST: 1}


async def test_a_group_whose_replies_are_lost_again_and_again_ends_in_an_error_not_in_a_loop() -> None:
    pool = make_pool([FakeWorker()], timeout_s=0.02, max_attempts=3)
    with pytest.raises(UnscoredGroupError, match="3 reward workers, or their answers, were lost over one group; last"):
        await pool.score(3, "a group")
    assert +pool.failures == {FailureKind.REPLY_LOST: 3}


@pytest.mark.parametrize(
    ("error", "failure", "kind"),
    [
        (WorkerDiedError("its process ended"), FailureKind.WORKER_DIED, "reward_died"),
        (DeadlineError("waited 5 s"), FailureKind.WORKER_HUNG, "reward_hung"),
        (StuckError("a call hangs"), FailureKind.WORKER_HUNG, "reward_hung"),
        (EngineLostError(Failure("no memory")), FailureKind.WORKER_DIED, "reward_died"),
        (RuntimeError("no memory"), FailureKind.WORKER_DIED, "reward_died"),
    ],
)
def test_a_lost_worker_is_a_failure_of_the_pool_and_a_restart_of_the_run(
    error: Exception, failure: FailureKind, kind: str
) -> None:
    restarts: list[str] = []
    losses = LossCounter(restarts.append)
    losses.count_loss(error)
    assert (+losses.failures, restarts) == ({failure: 1}, [kind])


async def test_a_group_that_kills_every_worker_ends_in_an_error_not_in_a_loop() -> None:
    for on_failure, error in (("exclude", UnscoredGroupError), ("stop", RewardError)):
        pool = make_pool(
            [FakeWorker(dead)], start=lambda index: FakeWorker(dead), max_attempts=3, on_failure=on_failure
        )
        with pytest.raises(error, match="3 reward workers, or their answers, were lost") as raised:
            await pool.score(0, "a group")
        assert type(raised.value) is error
        assert pool.failures[FailureKind.WORKER_DIED] == 3


async def test_a_group_that_kills_workers_costs_no_other_one_of_its_batch() -> None:
    def reply(group: Any) -> Any:
        return ActorDiedError() if group == 1 else scored(group)

    pool = make_pool([FakeWorker(reply)], start=lambda index: FakeWorker(reply), max_batch=3, max_attempts=2)
    results = await asyncio.gather(*(pool.score(i, "a group") for i in range(5)), return_exceptions=True)
    assert [r[0].value for r in (*results[:1], *results[2:])] == [0.0, 2.0, 3.0, 4.0]
    assert isinstance(results[1], UnscoredGroupError)
    assert pool.failures[FailureKind.WORKER_DIED] == 2


async def test_a_worker_that_cannot_start_is_counted_and_tried_again() -> None:
    starts = iter([RuntimeError("no memory"), FakeWorker(scored)])

    def start(index: int) -> FakeWorker:
        worker = next(starts)
        if isinstance(worker, Exception):
            raise worker
        return worker

    pool = make_pool([FakeWorker(dead)], start=start)
    assert (await pool.score(1, "a group"))[0].value == 1.0
    assert pool.failures[FailureKind.WORKER_DIED] == 2


async def test_the_pool_grows_and_shrinks_while_it_scores() -> None:
    newcomers: list[FakeWorker] = []

    def start(index: int) -> FakeWorker:
        newcomers.append(FakeWorker())
        return newcomers[-1]

    first = FakeWorker()
    pool = make_pool([first], start=start)
    tasks = [asyncio.create_task(pool.score(i, "a group")) for i in range(3)]
    await settle()
    await service(pool).pool.scale(2)
    await settle()
    assert [call[0] for call in newcomers[0].calls] == [1]
    await service(pool).pool.scale(1)
    first.finish(0)
    await settle()
    assert [call[0] for call in first.calls] == [0, 2], "who leaves takes nothing new"
    newcomers[0].finish(0), first.finish(1)
    assert [rewards[0].value for rewards in await asyncio.gather(*tasks)] == [0, 1, 2]
    await settle()
    assert [worker.name for worker in service(pool).pool.status()] == ["reward/0"]


def half_failed(_: Any) -> GroupOutcomes:
    return outcomes_of(
        {"accuracy": Score(1.0)},
        {"accuracy": ScoringFailure(FailureKind.TIMED_OUT, "waited 1 s")},
        {"accuracy": ScoringFailure(FailureKind.NOT_FINITE, "returned nan")},
    )


async def test_unscored_responses_are_excluded_and_counted_by_kind() -> None:
    pool = make_pool([FakeWorker(half_failed)])
    assert await pool.score(0, "a group") == (Reward(1.0, {"accuracy": 1.0}), None, None)
    await pool.score(0, "a group")
    none = dict.fromkeys(("failed", "worker_died", "worker_hung", "reply_lost", "retried"), 0)
    assert pool.failures == {"timed_out": 2, "not_finite": 2, **none}


async def test_on_failure_stop_names_the_component_and_the_next_action() -> None:
    pool = make_pool([FakeWorker(half_failed)], on_failure="stop")
    with pytest.raises(RewardError, match=r"p#1: .*'accuracy' timed_out .*rewards.on_failure=exclude"):
        await pool.score(0, "a group")
    assert pool.failures["timed_out"] == 1


async def test_an_error_of_the_group_itself_travels_and_frees_the_place() -> None:
    pool = make_pool([FakeWorker(lambda group: RewardError("no such object") if group == 0 else scored(group))])
    with pytest.raises(RewardError, match="no such object"):
        await pool.score(0, "a group")
    assert (await pool.score(1, "a group"))[0].value == 1.0


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="resources.reward.num_workers"):
        make_pool([])


async def test_groups_that_wait_travel_together_up_to_the_batch() -> None:
    worker = FakeWorker()
    pool = make_pool([worker], max_batch=3)
    tasks = [asyncio.create_task(pool.score(i, "a group")) for i in range(6)]
    await settle()
    worker.finish(0)
    await settle()
    assert [call[0] for call in worker.calls] == [[0, 1, 2], [3, 4, 5]]
    worker.finish(1)
    assert [rewards[0].value for rewards in await asyncio.gather(*tasks)] == list(range(6))


async def test_only_a_full_batch_goes_to_a_worker_that_is_busy() -> None:
    worker = FakeWorker()
    pool = make_pool([worker], max_batch=3, max_in_flight=2)
    tasks = [asyncio.create_task(pool.score(0, "a group"))]
    await settle()
    tasks += [asyncio.create_task(pool.score(i, "a group")) for i in (1, 2)]
    await settle()
    assert [call[0] for call in worker.calls] == [0], "two are no batch yet"
    tasks.append(asyncio.create_task(pool.score(3, "a group")))
    await settle()
    assert [call[0] for call in worker.calls] == [0, [1, 2, 3]]
    tasks.append(asyncio.create_task(pool.score(4, "a group")))
    worker.finish(0)
    worker.finish(1)
    await settle()
    assert worker.calls[-1][0] == 4, "a worker that has nothing to do takes what there is"
    worker.finish(2)
    assert [rewards[0].value for rewards in await asyncio.gather(*tasks)] == list(range(5))


async def test_a_group_that_cannot_be_had_costs_no_other_one_of_its_batch() -> None:
    worker = FakeWorker(lambda group: RewardError("no such object") if group == 1 else scored(group))
    pool = make_pool([worker], max_batch=3)
    results = await asyncio.gather(*(pool.score(i, "a group") for i in range(3)), return_exceptions=True)
    assert [r[0].value for r in (results[0], results[2])] == [0.0, 2.0]
    assert isinstance(results[1], RewardError)


async def test_beyond_the_queue_the_caller_waits_with_its_group() -> None:
    worker = FakeWorker()
    pool = make_pool([worker], max_queued=2)
    tasks = [asyncio.create_task(pool.score(i, "a group")) for i in range(4)]
    await settle()
    assert len(service(pool)._queue) == 1, "one travels, one waits, two are not let in"
    for index in range(4):
        worker.finish(index)
        await settle()
    assert [rewards[0].value for rewards in await asyncio.gather(*tasks)] == [0, 1, 2, 3]


async def test_a_group_whose_caller_gave_up_is_not_scored() -> None:
    worker = FakeWorker()
    pool = make_pool([worker])
    tasks = [asyncio.create_task(pool.score(i, "a group")) for i in range(3)]
    await settle()
    tasks[1].cancel()
    worker.finish(0)
    await settle()
    worker.finish(1)
    await asyncio.gather(tasks[0], tasks[2])
    assert [call[0] for call in worker.calls] == [0, 2]


async def test_closing_fails_the_waiting_calls() -> None:
    pool = make_pool([FakeWorker()])
    task = asyncio.create_task(pool.score(0, "a group"))
    await settle()
    await pool.close()
    with pytest.raises(RewardError, match="was closed"):
        await task


async def test_services_are_asked_in_the_order_of_gates_and_their_outcomes_merged() -> None:
    gate = Gate(component="style", needs="accuracy", at_least=1.0)
    recipe = Recipe(components=("accuracy", "style"), weights={"style": 0.5}, gates=(gate,), normalise=False)
    config = rewards_of(
        component("accuracy", "exact_match"),
        component_of("style", "model", service="judge"),
        recipes={"default": recipe},
    )
    rules = FakeWorker(lambda group: outcomes_of({"accuracy": Score(1.0)}, {"accuracy": Score(0.0)}))
    judge = FakeWorker(lambda group: outcomes_of({"style": Score(0.5)}, {}))
    one, other = (
        pool_over(config, [worker], hosts=FakeHosts(no_worker, booked=1), restarts=AT_ONCE) for worker in (rules, judge)
    )
    pool = RewardPool(config, {"reward": service(one), "judge": service(other)}, LossCounter())
    first, second = await pool.score(0, "a group")
    assert first == Reward(1.25, {"accuracy": 1.0, "style": 0.5})
    assert second == Reward(0.0, {"accuracy": 0.0}, {"style": "not run: accuracy is below 1"})
    assert judge.earlier == [[{"accuracy": Score(1.0)}, {"accuracy": Score(0.0)}]]
