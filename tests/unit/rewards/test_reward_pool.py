"""The reward pool over fake workers: load, retries, replacement, failures, and responses scored before their group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import AT_ONCE, FakeHosts, LocalHandle, never, settle
from interrupted import KnownSampler, token_at
from reward_data import answers, component, component_of, pool_over, rewards_of, worker_of

from mobula.actors.rollout.actor import MediaBatcher, RolloutActor
from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.server import PromptServer
from mobula.cluster.errors import (
    DeadlineError,
    EngineLostError,
    LostObjectError,
    RewardError,
    StuckError,
    UnscoredGroupError,
    WorkerDiedError,
)
from mobula.cluster.failures import Failure
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Answers, EndedResponse, EpisodeTurn, Response, Reward, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.configs.schema import Gate, Recipe
from mobula.rewards.components import response_digest
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.functions import BUILT_IN
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool, RewardService
from mobula.rewards.pool.worker import GroupOutcomes, Question, RewardWorker
from mobula.rewards.tools import Tools


class FakeWorker:
    """Answers on `finish`, or at once with `reply(group)`; the first `num_lost` replies never come."""

    def __init__(self, reply: Callable[[Any], Any] | None = None, *, num_lost: int = 0, hangs: bool = False) -> None:
        self.calls: list[tuple[Any, asyncio.Future[Any]]] = []  # a group, or the list of several
        self._reply = reply
        self._num_lost = num_lost
        self.ping = never if hangs else lambda: True

    async def score(self, questions: list[Question]) -> list[GroupOutcomes]:
        groups, future = [question.group for question in questions], asyncio.get_running_loop().create_future()
        self.calls.append((groups[0] if len(groups) == 1 else groups, future))
        if self._reply is None or len(self.calls) <= self._num_lost:
            return await future
        results = [self._reply(group) for group in groups]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def finish(self, index: int) -> None:
        groups, future = self.calls[index]
        future.set_result([scored(group) for group in (groups if isinstance(groups, list) else [groups])])


def scored(group: Any) -> GroupOutcomes:
    return outcomes_of({"accuracy": Score(float(group))})


def outcomes_of(*outcomes: Mapping[str, Outcome], label: str = "default") -> GroupOutcomes:
    return GroupOutcomes(label, tuple(f"p#{i}" for i in range(len(outcomes))), outcomes)


def dead(_: Any) -> Exception:
    return WorkerDiedError("its process ended")


def no_worker(index: int) -> Any:
    raise AssertionError(f"worker {index} was replaced")


def make_pool(
    workers: list[FakeWorker],
    *,
    start: Callable[[int], FakeWorker] = no_worker,
    on_failure: str = "exclude",
    **settings: Any,
) -> RewardPool:
    hosts = FakeHosts(lambda index: LocalHandle(start(index)), booked=len(workers))
    config = rewards_of(component("accuracy", "exact_match"), on_failure=on_failure)
    return pool_over(config, [LocalHandle(one) for one in workers], hosts=hosts, restarts=AT_ONCE, **settings)


def service(pool: RewardPool) -> RewardService:
    return pool.services["reward"]


async def test_a_worker_that_does_not_answer_is_replaced() -> None:
    pool = make_pool([FakeWorker(hangs=True)], start=lambda index: FakeWorker(scored), timeout_s=0.05, alive_s=0.05)
    assert (await pool.score(3, "a group"))[0].value == 3.0
    assert +pool.failures == {FailureKind.WORKER_HUNG: 1}


async def test_a_worker_that_loses_a_reply_is_not_replaced() -> None:
    pool = make_pool([FakeWorker(scored, num_lost=1)], timeout_s=0.05)
    assert (await pool.score(3, "a group"))[0].value == 3.0
    assert +pool.failures == {FailureKind.REPLY_LOST: 1}


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
        return dead(group) if group == 1 else scored(group)

    pool = make_pool([FakeWorker(reply)], start=lambda index: FakeWorker(reply), max_batch=3, max_attempts=2)
    results = await asyncio.gather(*(pool.score(i, "a group") for i in range(5)), return_exceptions=True)
    assert [r[0].value for r in (*results[:1], *results[2:])] == [0.0, 2.0, 3.0, 4.0]
    assert isinstance(results[1], UnscoredGroupError)
    assert pool.failures[FailureKind.WORKER_DIED] == 2


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


CHUNK = 4

LENGTHS = (3, 30)  # of the siblings, in tokens: the first one ends long before the second

SETTINGS = SamplingSettings(num_samples=2, temperature=1.0, max_tokens=64, seed=0)

DEADLINES_S = dict.fromkeys(("start_s", "rollout_s", "sync_s", "sign_s", "probe_s", "stop_s"), 5.0)

PROMPT_ID = "0/0/a"


class Asked:
    """A real reward worker's handle, called in this process; it notes what it is asked, and may be held or fail."""

    def __init__(self, worker: RewardWorker) -> None:
        self.questions: list[Question] = []
        self.errors: list[Exception] = []  # to raise, one a call, before it answers
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._worker = worker

    def ping(self) -> bool:
        return True

    async def score(self, questions: list[Question]) -> list[GroupOutcomes]:
        self.questions += questions
        await self.is_open.wait()
        if self.errors:
            raise self.errors.pop(0)
        return self._worker.score(questions)

    @property
    def scored(self) -> list[str]:
        """What was asked for: the text of an ended response, or `group` with the siblings that are known of it."""
        return [
            q.group.responses[0].text if isinstance(q.group, Answers) else f"group but {sorted(q.known)}"
            for q in self.questions
        ]


class Bench:
    """A pool of one worker that scores one component, the length of the text, as often as it is asked."""

    def __init__(self, function: str = "length", on_failure: str = "exclude", retries: int = 0) -> None:
        config = rewards_of(component_of("length", function, retries=retries), on_failure=on_failure)
        self.asked = Asked(worker_of(config))
        hosts = FakeHosts(lambda index: LocalHandle(self.asked), booked=1)
        handle = LocalHandle(self.asked)
        self.pool = pool_over(config, [handle], hosts=hosts, restarts=AT_ONCE, max_in_flight=8)
        self.in_flight_requests = InFlightRequests(CHUNK, on_ended=self.pool.score_ahead)

    async def values(self, group: TrajectoryGroup) -> list[float | None]:
        rewards = await asyncio.wait_for(self.pool.score(group, group.group_id), 5)
        return [reward and reward.value for reward in rewards]

    def begin(self, group: TrajectoryGroup, sibling: int) -> None:
        self.pool.score_ahead(EndedResponse(group.prompt, sibling, group.trajectories[sibling].response))


class Length:
    """The length of the text; some texts are refused."""

    def __init__(self, tools: Tools) -> None: ...

    def __call__(self, request: RewardRequest) -> float:
        if request.response.text == "bad":
            raise KeyError("a bug")
        return float(len(request.response.text))


class IsLong(Length):
    """Whether it has more than one letter."""

    def __call__(self, request: RewardRequest) -> float:
        return float(super().__call__(request) > 1)


class Flaky(Length):
    """Fails over every text once."""

    def __init__(self, tools: Tools) -> None:
        self._seen: set[str] = set()

    def __call__(self, request: RewardRequest) -> float:
        if request.response.text not in self._seen:
            self._seen.add(request.response.text)
            raise KeyError("the first time")
        return super().__call__(request)


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "length", f"{__name__}:Length")
    monkeypatch.setitem(BUILT_IN, "flaky", f"{__name__}:Flaky")
    monkeypatch.setitem(BUILT_IN, "is_long", f"{__name__}:IsLong")


@pytest.fixture
def bench(functions: None) -> Bench:
    return Bench()


class Words:
    """A tokenizer of a kind."""

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in token_ids)


class Rollout(RolloutActor):
    """The real actor but for its engine."""

    def __init__(self, sampler: KnownSampler) -> None:
        PromptServer.__init__(self)
        self._sampler = sampler
        self._tokenizer = Words()
        self._hidden_ids = frozenset()
        self._media = MediaBatcher(MediaReader(timeout_s=1, max_items=1))


def rollouts(bench: Bench, *samplers: KnownSampler) -> RetryingRollouts:
    clients = [
        RolloutClient(
            LocalHandle(Rollout(sampler)), "rollout/0", in_flight_requests=bench.in_flight_requests, **DEADLINES_S
        )
        for sampler in samplers
    ]

    class Pool:
        async def generate(self, prompt: Any, settings: SamplingSettings) -> Any:
            return await clients.pop(0).generate(prompt, settings)

    return RetryingRollouts(Pool(), bench.in_flight_requests, max_retries=1, on_retry=lambda kind: None)


def text(sibling: int) -> str:
    return " ".join(str(token_at(PROMPT_ID, sibling, position)) for position in range(LENGTHS[sibling]))


PROMPT = answers(PROMPT_ID, "").prompt


async def test_the_first_sibling_is_scored_before_the_last_one_ends(bench: Bench) -> None:
    """The engine goes on with the long response only once the short one has been scored."""

    async def before_step(step: int) -> None:
        while step == 20 and bench.asked.scored != [text(0)]:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    reference, *_ = await rollouts(bench, KnownSampler(LENGTHS, CHUNK, before_step)).generate(PROMPT, SETTINGS)
    group = await reference.future()
    assert await bench.values(group) == [len(text(0)), len(text(1))]
    assert bench.asked.scored == [text(0), "group but [0]"]
    assert bench.pool.scored_ahead == {"used": 1, "unused": 0}
    assert bench.asked.questions[0].group.prompt.expanded_ids.size == 0, "tokens do not travel to reward workers"


async def test_a_response_that_ended_on_a_lost_engine_is_scored_once(bench: Bench) -> None:
    async def dies(step: int) -> None:
        await asyncio.sleep(0)
        if step == 20:
            raise WorkerDiedError("SIGKILL")

    both = KnownSampler(LENGTHS, CHUNK, dies), KnownSampler(LENGTHS, CHUNK)
    reference, *_ = await rollouts(bench, *both).generate(PROMPT, SETTINGS)
    assert await bench.values(await reference.future()) == [len(text(0)), len(text(1))]
    assert bench.asked.scored == [text(0), "group but [0]"]


async def test_siblings_that_end_together_cost_one_question(bench: Bench) -> None:
    sampler = KnownSampler((9, 10), CHUNK)
    reference, *_ = await rollouts(bench, sampler).generate(PROMPT, SETTINGS)
    assert None not in await bench.values(await reference.future())
    assert bench.asked.scored == ["group but []"]
    assert bench.pool.scored_ahead == {"used": 0, "unused": 0}


async def test_another_response_than_the_one_that_was_scored_is_scored_with_its_group(bench: Bench) -> None:
    group = answers(PROMPT_ID, "abc", "de")
    bench.begin(answers(PROMPT_ID, "abcdef", ""), 0)
    await settle()
    assert await bench.values(group) == [3.0, 2.0]
    assert bench.pool.scored_ahead == {"used": 0, "unused": 1}
    cut = replace(group.trajectories[0], response=Response("abc", 1, is_truncated=True))
    bench.begin(TrajectoryGroup(group.prompt, (cut, group.trajectories[1])), 0)
    assert await bench.values(group) == [3.0, 2.0]
    assert bench.pool.scored_ahead == {"used": 0, "unused": 2}, "of the same text, but cut off"


async def test_a_group_asks_for_the_rest_while_what_was_begun_is_still_scored(bench: Bench) -> None:
    bench.asked.is_open.clear()
    group = answers(PROMPT_ID, "abc", "de")
    bench.begin(group, 0)
    scored = asyncio.create_task(bench.values(group))
    await settle()
    assert bench.asked.scored == ["abc", "group but [0]"]
    bench.asked.is_open.set()
    assert await scored == [3.0, 2.0]


async def test_a_failure_is_counted_once_and_by_its_own_name(bench: Bench) -> None:
    group = answers(PROMPT_ID, "bad", "de")
    bench.begin(group, 0)
    await settle()
    assert await bench.values(group) == [None, 2.0]
    assert +bench.pool.failures == {"failed": 1}
    assert bench.asked.scored == ["bad", "group but [0]"], "what retries there are belong to the component"


async def test_what_was_tried_again_is_counted_ahead_and_with_the_group(functions: None) -> None:
    bench, group = Bench("flaky", retries=1), answers(PROMPT_ID, "abc", "de", "f")
    bench.begin(group, 0)
    await settle()
    assert await bench.values(group) == [3.0, 2.0, 1.0]
    assert +bench.pool.failures == {"retried": 3}


async def test_with_stop_a_failure_ends_the_run_when_the_group_is_there(functions: None) -> None:
    stopping = Bench(on_failure="stop")
    group = answers(PROMPT_ID, "bad", "de")
    stopping.begin(group, 0)
    with pytest.raises(RewardError, match=r"0/0/a#0: .*'length' failed"):
        await stopping.values(group)


@pytest.mark.parametrize(
    ("errors", "losses"),
    [
        ([LostObjectError("an image is gone")], 0),
        ([RewardError("no such object")], 0),
        ([WorkerDiedError("SIGKILL")] * 3, 3),
    ],
)
async def test_what_could_not_be_brought_to_a_worker_is_scored_with_its_group(
    bench: Bench, errors: list[Exception], losses: int
) -> None:
    group = answers(PROMPT_ID, "abc", "de")
    bench.asked.errors = list(errors)
    bench.begin(group, 0)
    await settle()
    assert await bench.values(group) == [3.0, 2.0]
    assert bench.pool.failures["worker_died"] == losses
    assert bench.pool.scored_ahead == {"used": 0, "unused": 1}


async def test_gates_see_what_was_scored_ahead_and_each_service_is_asked_once(functions: None) -> None:
    gate = Gate(component="length", needs="is_long", at_least=1.0)
    recipe = Recipe(components=("is_long", "length"), weights={}, gates=(gate,), normalise=False)
    config = rewards_of(
        component("is_long", "is_long"), component_of("length", "length", service="judge"), recipes={"default": recipe}
    )
    both = {name: Asked(worker_of(config, name)) for name in ("reward", "judge")}
    hosts = FakeHosts(lambda index: None, booked=1)
    services = {
        name: pool_over(config, [LocalHandle(asked)], hosts=hosts, restarts=AT_ONCE).services["reward"]
        for name, asked in both.items()
    }
    pool = RewardPool(config, services, LossCounter())
    group = answers(PROMPT_ID, "77", "8", "7777")
    for sibling in (0, 1):
        pool.score_ahead(EndedResponse(group.prompt, sibling, group.trajectories[sibling].response))
    await settle()
    rewards = await pool.score(group, PROMPT_ID)
    assert [reward and reward.value for reward in rewards] == [3.0, 0.0, 5.0]
    assert rewards[0] == Reward(3.0, {"is_long": 1.0, "length": 2.0})
    assert rewards[1] == Reward(0.0, {"is_long": 0.0}, {"length": "not run: is_long is below 1"})
    assert [asked.scored for asked in both.values()] == [["77", "8", "group but [0, 1]"]] * 2


def test_a_run_sends_responses_that_end_to_its_reward_pool(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    from mobula.deploy.wiring import roles  # everything that a run is made of, which no other test here needs

    given: list[object] = []
    kinds: list[str] = []
    monkeypatch.setattr(roles, "reward_pool", lambda config, spawner, on_lost: given.append(on_lost) or bench.pool)
    monkeypatch.setattr(roles, "rollout_pool", lambda prepared, spawner, in_flight_requests, on_lost: None)
    environment = SimpleNamespace(is_on=False)
    config = SimpleNamespace(sampler=SimpleNamespace(chunk_tokens=CHUNK), environment=environment)
    inference = roles.spawn_inference(SimpleNamespace(config=config), None, kinds.append)
    assert inference.in_flight_requests.on_ended == bench.pool.score_ahead
    assert given == [kinds.append], "a reward worker that is lost counts as a restart"


async def test_closing_gives_up_what_was_begun(bench: Bench) -> None:
    bench.asked.is_open.clear()
    before = asyncio.all_tasks()
    bench.begin(answers(PROMPT_ID, "abc", "de"), 0)
    await settle()
    await bench.pool.close()
    bench.asked.is_open.set()
    await settle()
    assert asyncio.all_tasks() == before


def test_images_turns_and_failures_are_part_of_what_a_response_is() -> None:
    plain = Response("a", 1, False)
    changes = [{"images": images} for images in ((b"1",), (b"2",), (b"1", b"2"))]
    changes += [{"turns": (EpisodeTurn(0, 1, "a", "seen", {"task": reward}, "none"),)} for reward in (0.0, 1.0)]
    changes += [{"failure": "hung: 30 s"}]
    assert len({response_digest(replace(plain, **change)) for change in ({}, *changes)}) == 7
