"""A response that ends before its siblings is scored while those go on, and counts only if its group holds it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from handles import LocalHandle
from hosts import AT_ONCE, FakeHosts, settle
from interrupted import KnownSampler, token_at
from reward_data import answers, component, component_of, pool_over, rewards_of

from mobula.actors.rollout.actor import MediaBatcher, RolloutActor
from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.server import PromptServer
from mobula.cluster.errors import LostObjectError, RewardError, WorkerDiedError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Answers, EndedResponse, EpisodeTurn, Response, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.configs.schema import Gate, Recipe
from mobula.rewards.contract import RewardRequest
from mobula.rewards.functions import BUILT_IN
from mobula.rewards.isolation.process import Tools
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool
from mobula.rewards.pool.worker import GroupOutcomes, Question, RewardWorker, response_digest

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
        self.asked = Asked(_worker(config, "reward"))
        hosts = FakeHosts(lambda index: LocalHandle(self.asked), booked=1)
        handle = LocalHandle(self.asked)
        self.pool = pool_over(config, [handle], hosts=hosts, restarts=AT_ONCE, max_in_flight=8)
        self.in_flight_requests = InFlightRequests(CHUNK, on_ended=self.pool.score_ahead)

    async def values(self, group: TrajectoryGroup) -> list[float | None]:
        rewards = await asyncio.wait_for(self.pool.score(group, group.group_id), 5)
        return [reward and reward.value for reward in rewards]

    def begin(self, group: TrajectoryGroup, sibling: int) -> None:
        """As if the in-flight request had received its end."""
        self.pool.score_ahead(EndedResponse(group.prompt, sibling, group.trajectories[sibling].response))


def _worker(config: Any, service: str) -> RewardWorker:
    return RewardWorker(
        config,
        service,
        object_timeout_s=5,
        start_timeout_s=60,
        function_timeout_s=5,
        group_timeout_s=5,
        device="cpu",
        dtype="float32",
    )


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


@pytest.fixture(autouse=True)
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
    """On one engine after the other."""
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


async def test_what_was_tried_again_is_counted_ahead_and_with_the_group() -> None:
    bench, group = Bench("flaky", retries=1), answers(PROMPT_ID, "abc", "de", "f")
    bench.begin(group, 0)
    await settle()
    assert await bench.values(group) == [3.0, 2.0, 1.0]
    assert +bench.pool.failures == {"retried": 3}


async def test_with_stop_a_failure_ends_the_run_when_the_group_is_there() -> None:
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


async def test_gates_see_what_was_scored_ahead_and_each_service_is_asked_once() -> None:
    gate = Gate(component="length", needs="is_long", at_least=1.0)
    recipe = Recipe(components=("is_long", "length"), weights={}, gates=(gate,), normalise=False)
    config = rewards_of(
        component("is_long", "is_long"),
        component_of("length", "length", service="judge"),
        recipes={"default": recipe},
    )
    both = {name: Asked(_worker(config, name)) for name in ("reward", "judge")}
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
    assert [asked.scored for asked in both.values()] == [["77", "8", "group but [0, 1]"]] * 2


def test_a_run_sends_responses_that_end_to_its_reward_pool(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    from mobula.deploy.wiring import build  # everything that a run is made of, which no other test here needs

    given: list[object] = []
    kinds: list[str] = []
    monkeypatch.setattr(build, "reward_pool", lambda config, spawner, on_lost: given.append(on_lost) or bench.pool)
    monkeypatch.setattr(build, "rollout_pool", lambda prepared, spawner, in_flight_requests, on_lost: None)
    environment = SimpleNamespace(is_on=False)
    config = SimpleNamespace(sampler=SimpleNamespace(chunk_tokens=CHUNK), environment=environment)
    inference = build.spawn_inference(SimpleNamespace(config=config), None, kinds.append)
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


def test_images_are_part_of_what_a_response_is() -> None:
    found = {response_digest(Response("a", 1, False, images)) for images in ((), (b"1",), (b"2",), (b"1", b"2"))}
    assert len(found) == 4


def test_turns_and_failures_are_part_of_what_a_response_is() -> None:
    turns = [(EpisodeTurn(0, 1, "a", "seen", {"task": reward}, "none"),) for reward in (0.0, 1.0)]
    found = {response_digest(Response("a", 1, False, turns=own)) for own in ((), *turns)}
    assert len(found | {response_digest(Response("a", 1, False, failure="hung: 30 s"))}) == 4
