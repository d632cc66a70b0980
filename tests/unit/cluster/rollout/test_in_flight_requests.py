"""In-flight requests: what is known of a prompt in flight, over all tries at it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import LocalHandle, make_prompt
from interrupted import KnownSampler, content, for_ever, token_at

from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.server import PromptServer
from mobula.cluster.errors import DeadlineError, RolloutError, WorkerDiedError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.partial_response import Attempt, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import PROMPTS, TOKENS_KEPT, TOKENS_LOST, InFlightRequests
from mobula.deploy.rehearsal.simulated.machine import run_virtually

PROMPT = make_prompt("0/0/s0")
SETTINGS = SamplingSettings(num_samples=2, temperature=0.0, max_tokens=20, seed=1)
CHUNK = 4
DEADLINES_S = dict.fromkeys(("start_s", "rollout_s", "sync_s", "sign_s", "probe_s", "stop_s"), 5.0)


def tokens(num: int, finish_reason: FinishReason | None = None) -> SampledSequence:
    spans = (WeightSpan(0, 0, num),)
    return SampledSequence(
        TokenActions(np.zeros(num, dtype=np.int32)), np.zeros(num, dtype=np.float32), spans, finish_reason
    )


def chunk(attempt: Attempt, start: int, num: int, sibling: int = 0, end: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(attempt.request_id, sibling, start, tokens(num, end))


def test_the_next_attempt_begins_where_the_last_chunk_ended() -> None:
    in_flight_requests = InFlightRequests(CHUNK)
    with in_flight_requests.held(PROMPT, SETTINGS) as in_flight:
        first = in_flight.next_attempt()
        assert first.siblings == ()
        in_flight.add(chunk(first, 0, 5))
        in_flight.add(chunk(first, 5, 4))
        in_flight.add(chunk(first, 0, 3, sibling=1, end=FinishReason.STOP))
        second = in_flight.next_attempt()
        assert [sibling.num_tokens for sibling in second.siblings] == [9, 3]
        assert [sibling.is_finished for sibling in second.siblings] == [False, True]
        assert second.request_id != first.request_id


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
