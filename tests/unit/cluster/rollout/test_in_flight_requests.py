"""Requests in flight keep their tokens, and prompts come in the order of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakePrompts, LocalHandle, make_prompt
from interrupted import KnownSampler, content, for_ever, token_at
from waiting import until

from mobula.actors.datasets.prompts import InDriver, PromptSource
from mobula.actors.datasets.rows import Row
from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.server import PromptServer
from mobula.cluster.errors import DeadlineError, RolloutError, WorkerDiedError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.partial_response import Attempt, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.group_observers import OpeningRule, StageCurriculum
from mobula.cluster.rollout.in_flight import PROMPTS, TOKENS_KEPT, TOKENS_LOST, InFlightRequests, PromptPrefetcher
from mobula.cluster.workers.supervisor import background_tasks
from mobula.configs.load import load_config
from mobula.deploy.rehearsal.simulated.machine import run_virtually

PROMPT = make_prompt("0/0/s0")

SETTINGS = SamplingSettings(num_samples=2, temperature=0.0, max_tokens=20, seed=1)

CHUNK = 4

DEADLINES_S = dict.fromkeys(("start_s", "rollout_s", "sync_s", "sign_s", "probe_s", "stop_s"), 5.0)


def tokens(num: int, finish_reason: FinishReason | None = None) -> SampledSequence:
    actions, logprobs = TokenActions(np.zeros(num, dtype=np.int32)), np.zeros(num, dtype=np.float32)
    return SampledSequence(actions, logprobs, (WeightSpan(0, 0, num),), finish_reason)


def chunk(attempt: Attempt, start: int, num: int, sibling: int = 0, end: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(attempt.request_id, sibling, start, tokens(num, end))


def test_chunks_that_leave_a_gap_come_twice_or_too_late_are_refused() -> None:
    with InFlightRequests(CHUNK).held(PROMPT, SETTINGS) as in_flight:
        first = in_flight.next_attempt()
        in_flight.add(chunk(first, 0, 4))
        with pytest.raises(RolloutError, match="has 4 tokens, its next chunk begins after 8"):
            in_flight.add(chunk(first, 8, 4))
        with pytest.raises(RolloutError, match="has 4 tokens, its next chunk begins after 0"):
            in_flight.add(chunk(first, 0, 4))
        in_flight.next_attempt()
        with pytest.raises(RolloutError, match="which is not its attempt"):
            in_flight.add(chunk(first, 4, 4))
        assert in_flight.num_tokens == 4


def test_a_response_that_is_begun_again_leaves_nothing_of_its_first_beginning() -> None:
    with InFlightRequests(CHUNK).held(PROMPT, SETTINGS) as in_flight:
        attempt = in_flight.next_attempt()
        in_flight.add(chunk(attempt, 0, 4, end=FinishReason.STOP))
        in_flight.add(replace(chunk(attempt, 0, 3), is_restart=True))
        in_flight.add(chunk(attempt, 3, 2))
        assert (in_flight.siblings[0].num_tokens, in_flight.siblings[0].is_finished) == (5, False)


def test_tokens_kept_and_lost_are_counted_once_for_each_handover() -> None:
    in_flight_requests = InFlightRequests(CHUNK)
    with in_flight_requests.held(PROMPT, SETTINGS) as in_flight:
        first = in_flight.next_attempt()
        in_flight.add(chunk(first, 0, 8))
        in_flight.add(chunk(first, 0, 2, sibling=1, end=FinishReason.STOP))
        in_flight.next_attempt()
        assert in_flight_requests.resumed == {PROMPTS: 1, TOKENS_KEPT: 10, TOKENS_LOST: CHUNK - 1}
        in_flight.next_attempt()  # the second one died before its first chunk
        assert in_flight_requests.resumed == {PROMPTS: 2, TOKENS_KEPT: 10, TOKENS_LOST: 2 * (CHUNK - 1)}


def test_a_response_shorter_than_a_chunk_may_be_lost_whole() -> None:
    in_flight_requests = InFlightRequests(64)
    with in_flight_requests.held(PROMPT, SETTINGS) as in_flight:
        in_flight.next_attempt()
        in_flight.next_attempt()
    assert in_flight_requests.resumed == {PROMPTS: 1, TOKENS_KEPT: 0, TOKENS_LOST: 2 * SETTINGS.max_tokens}


def test_the_table_names_the_prompt_that_is_in_flight_for_longest() -> None:
    now = [100.0]
    in_flight_requests = InFlightRequests(CHUNK, clock=lambda: now[0])
    assert in_flight_requests.summary().oldest_id is None
    with in_flight_requests.held(make_prompt("0/1/s1"), SETTINGS):
        now[0] = 103.0
        with in_flight_requests.held(PROMPT, SETTINGS):
            found = in_flight_requests.summary()
            assert (found.num_prompts, found.oldest_id, found.oldest_age_s) == (2, "0/1/s1", 3.0)
    assert in_flight_requests.summary().num_prompts == 0


class Actor(PromptServer):
    """A rollout actor around a sampler; it dies when the sampler raises `WorkerDiedError`."""

    def __init__(self, sampler: KnownSampler) -> None:
        super().__init__()
        self.attempts: list[Attempt] = []
        self.handle = LocalHandle(self)
        self._sampler = sampler

    async def generate(self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt) -> tuple[list, tuple]:
        self.attempts.append(attempt)
        try:
            return await self._sampler.sample(prompt, (), settings, attempt, self._tell), ("summary", None)
        except WorkerDiedError as error:
            self.handle.die(error)
            raise

    def _tell(self, chunks: Sequence[TokenChunk], siblings: Sequence[SampledSequence]) -> None:
        self.report(chunks)


class Engines:
    """Rollouts on one client after the other."""

    def __init__(self, *clients: RolloutClient) -> None:
        self._clients = list(clients)

    async def generate(self, prompt: Prompt, settings: SamplingSettings):
        return await self._clients.pop(0).generate(prompt, settings)


def client(actor: Actor, in_flight_requests: InFlightRequests, **deadlines: float) -> RolloutClient:
    return RolloutClient(actor.handle, "rollout/0", in_flight_requests=in_flight_requests, **DEADLINES_S | deadlines)


async def dies(step: int) -> None:
    await asyncio.sleep(0)
    if step == 10:
        raise WorkerDiedError("SIGKILL")


async def hangs(step: int) -> None:
    await (for_ever(step) if step == 10 else asyncio.sleep(0))


@pytest.mark.parametrize(("before_step", "error"), [(dies, WorkerDiedError), (hangs, DeadlineError)])
async def test_another_actor_goes_on_from_the_last_chunk(before_step, error: type[Exception]) -> None:
    in_flight_requests, caught = InFlightRequests(CHUNK), []
    lost, other = Actor(KnownSampler((17, 6), CHUNK, before_step)), Actor(KnownSampler((17, 6), CHUNK))
    engines = Engines(client(lost, in_flight_requests, rollout_s=0.2, sign_s=0.1), client(other, in_flight_requests))
    rollouts = RetryingRollouts(engines, in_flight_requests, max_retries=1, on_retry=caught.append)
    reference, *_ = await rollouts.generate(PROMPT, SETTINGS)
    group = await reference.future()
    assert caught == [error.__name__]
    assert [sibling.num_tokens for sibling in other.attempts[0].siblings] == [8, 6]
    for index, length in enumerate((17, 6)):
        expected = [token_at(PROMPT.prompt_id, index, position) for position in range(length)]
        assert content(group[index])[0] == expected
    assert in_flight_requests.resumed == {PROMPTS: 1, TOKENS_KEPT: 14, TOKENS_LOST: CHUNK - 1}


@pytest.mark.parametrize(("chunk_tokens", "is_late"), [(4, False), (16, True)])
def test_a_rollout_that_makes_progress_is_not_late(chunk_tokens: int, is_late: bool) -> None:
    """20 steps of 1 s, at most 5 s from chunk to chunk."""

    async def go() -> list[SampledSequence]:
        actor = Actor(KnownSampler((20, 20), chunk_tokens, lambda step: asyncio.sleep(1)))
        reference, *_ = await client(actor, InFlightRequests(chunk_tokens), rollout_s=5).generate(PROMPT, SETTINGS)
        return await reference.future()

    if is_late:
        with pytest.raises(DeadlineError, match="waited 5 s for rollout/0 to generate prompt 0/0/s0"):
            run_virtually(go())
    else:
        assert [sequence.num_tokens for sequence in run_virtually(go())] == [20, 20]


async def test_prompts_come_in_order_each_with_its_own_cursor() -> None:
    source = FakePrompts()
    source.restore(7, ["0/2/s2"])
    prefetcher = PromptPrefetcher(source, 3)
    async with background_tasks() as tasks:
        tasks.create_task(prefetcher.prepare())
        found = [await prefetcher.next() for _ in range(4)]
    assert [(prompt.prompt_id, cursor) for prompt, cursor in found] == [
        ("0/2/s2", 7), ("0/7/s7", 8), ("0/8/s8", 9), ("0/9/s9", 10),
    ]  # fmt: skip


async def test_no_more_are_prepared_than_allowed() -> None:
    source = FakePrompts()
    prefetcher = PromptPrefetcher(source, 2)
    async with background_tasks() as tasks:
        tasks.create_task(prefetcher.prepare())
        await prefetcher.next()
        await until(lambda: source.cursor == 1 + 2 + 1)
        await asyncio.sleep(0.05)  # for what must not happen
        assert source.cursor == 1 + 2 + 1, "one taken, two ready, and one in the hands of who prepares"


NUM_STAGES = 3


def curriculum(num_episodes: int, success_rate: float, opened: list[int] | None = None) -> StageCurriculum:
    rule = OpeningRule(num_episodes, success_rate)
    return StageCurriculum(NUM_STAGES, rule, on_opened=(opened if opened is not None else []).append)


def test_a_number_of_episodes_of_the_newest_stage_opens_the_next_one() -> None:
    opened: list[int] = []
    found = curriculum(4, 0.0, opened)
    found.observe(0, [False, False])
    assert [found.is_open(stage) for stage in range(NUM_STAGES)] == [True, False, False]
    found.observe(0, [False, True])
    found.observe(0, [True] * 100)  # of an earlier stage
    assert found.newest == 1
    found.observe(1, [False] * 4)
    found.observe(2, [True] * 100)
    assert (found.newest, opened) == (2, [1, 2])


def test_success_counts_over_the_last_episodes_of_the_newest_stage() -> None:
    found = curriculum(4, 0.75)
    found.observe(0, [True, True, True])
    assert found.newest == 0, "too few episodes"
    found = curriculum(4, 0.75)
    found.observe(0, [False, False, True, True, True])  # three of the last four
    assert found.newest == 1
    found.observe(1, [True, False, False, True])
    assert found.newest == 1


class Maker:
    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        return replace(make_prompt(prompt_id), metadata=row.metadata)


def test_rows_of_closed_stages_are_passed_over_and_asked_in_a_later_epoch() -> None:
    rows = tuple(Row(f"r{n}", "?", "", "", metadata={"stage": n % 3}) for n in range(9))
    found = curriculum(1, 0.0)
    source = PromptSource(
        rows, InDriver(Maker()), seed=1, split_name="train", is_open=lambda row: found.is_open(row.metadata["stage"])
    )
    first = [source.next() for _ in range(3)]
    assert {prompt.metadata["stage"] for prompt in first} == {0}
    found.observe(0, [True])
    found.observe(1, [True])
    cursor = source.cursor
    later = [source.next() for _ in range(18)]
    assert {prompt.metadata["stage"] for prompt in later} == {0, 1, 2}
    again = PromptSource(rows, InDriver(Maker()), seed=1, split_name="train")
    again.restore(cursor, ())
    assert [again.next().prompt_id for _ in range(18)] == [prompt.prompt_id for prompt in later]


@pytest.mark.parametrize("words", [["kind=success"], ["kind=none", "stages=[{size: 2}, {size: 3}]"]])
def test_stages_and_what_opens_them_go_together(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"environment\.curriculum"):
        load_config(["experiment=pixel_maze", *(f"environment.curriculum.{word}" for word in words)])
