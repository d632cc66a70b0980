"""A response that is taken up where a lost actor left it is the response that it would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from engines import CHUNK_TOKENS, TEMPERATURE, Engine, gaps, until_grown

from mobula.cluster.records.partial_response import SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import Prompt, Trajectory, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequest
from mobula.learner.learner import Learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 5 * CHUNK_TOKENS + 3
CUTS = (CHUNK_TOKENS, 4 * CHUNK_TOKENS, NUM_TOKENS, 0)  # what an earlier attempt left of each sibling
GREEDY = SamplingSettings(len(CUTS), 0.0, NUM_TOKENS, seed=5)
SAMPLED = SamplingSettings(len(CUTS), TEMPERATURE, NUM_TOKENS, seed=5)


@pytest.fixture(params=["vllm-untied", "huggingface"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


def as_sampled(t: Trajectory) -> SampledSequence:
    return SampledSequence(t.actions, t.behavior_logprobs, t.weight_spans, t.finish_reason)


def leave(in_flight: InFlightRequest, siblings: Sequence[SampledSequence]) -> None:
    """The in-flight request holds of each sibling what is before its cut; a sibling that was not cut is finished."""
    attempt = in_flight.next_attempt()
    for index, (whole, cut) in enumerate(zip(siblings, CUTS, strict=True)):
        known = whole if cut >= whole.num_tokens else whole.until(cut)
        in_flight.add(TokenChunk(attempt.request_id, index, 0, known))


async def resumed(
    engine: Engine, prompt: Prompt, settings: SamplingSettings, siblings: Sequence[SampledSequence]
) -> TrajectoryGroup:
    """What comes of the group whose first attempt would have given `siblings` and was broken off at CUTS."""
    with engine.in_flight_requests.held(prompt, settings) as in_flight:
        leave(in_flight, siblings)
        return await engine.generate(prompt, settings)


async def test_an_interrupted_greedy_response_equals_the_uninterrupted_one_wherever_it_was_cut(engine: Engine) -> None:
    for prompt in engine.model.prompts:  # with no, one and two images
        whole = await engine.decode(prompt, max_tokens=NUM_TOKENS)
        assert whole.num_steps > CHUNK_TOKENS, "nothing is left to resume"
        group = await resumed(engine, prompt, GREEDY, [as_sampled(whole)] * len(CUTS))
        for found, cut in zip(group.trajectories, CUTS, strict=True):
            assert found.actions.token_ids.tolist() == whole.actions.token_ids.tolist()
            assert found.finish_reason is whole.finish_reason
            assert found.response == whole.response
            kept, again = np.split(found.behavior_logprobs - whole.behavior_logprobs, [cut])
            assert not kept.any(), "tokens that were kept keep their log-probs to the bit"
            assert np.abs(again).max(initial=0) <= 1e-5


async def test_samples_after_an_interruption_are_of_the_learners_distribution(engine: Engine, learner: Learner) -> None:
    for prompt in engine.model.prompts:
        whole = await engine.generate(prompt, SAMPLED)
        group = await resumed(engine, prompt, SAMPLED, [as_sampled(trajectory) for trajectory in whole.trajectories])
        assert gaps(learner, engine.model, [group]).max() <= 2e-5
        for before, after, cut in zip(whole.trajectories, group.trajectories, CUTS, strict=True):
            assert after.actions.token_ids[:cut].tolist() == before.actions.token_ids[:cut].tolist()


async def test_a_response_is_reported_while_it_grows_with_all_its_versions(engine: Engine, learner: Learner) -> None:
    """Two pushes arrive while the group is sampled; vLLM takes them in the middle, the other sampler afterwards.

    Only what came with the group's last output is not reported. That is a chunk and, where the actor's process did not
    get to read for a while, whatever vLLM put together with it (test_nothing_is_lost has the bound of one chunk).
    """
    prompt, settings = engine.model.probe, SamplingSettings(6, TEMPERATURE, 300, seed=5)
    with engine.in_flight_requests.held(prompt, settings) as in_flight:
        running = asyncio.ensure_future(engine.generate(prompt, settings))
        for version in (1, 2):
            await until_grown(in_flight, running)
            await engine.serve(learner, version)
        group = await running
        assert engine.kind != "vllm" or set(group.summary().tokens_by_version) > {0}, "no push came in the middle"
        assert in_flight.num_tokens > group.summary().num_tokens / 2
        for known, trajectory in zip(in_flight.siblings, group.trajectories, strict=True):
            whole = as_sampled(trajectory)
            expected = whole.until(known.num_tokens)
            assert known.actions.token_ids.tolist() == expected.actions.token_ids.tolist()
            assert known.logprobs.tolist() == expected.logprobs.tolist()
            assert known.weight_spans == expected.weight_spans
