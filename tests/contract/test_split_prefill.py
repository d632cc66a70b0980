"""A prefill that is split over engine steps, for whatever reason, changes nothing of what is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from engines import TEMPERATURE, Engine, Model, gaps, open_model, start_actor, until_grown

from mobula.cluster.records.trajectory import TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.learner.learner import Learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 60
BUDGET = 16  # tokens a step: a prompt of the model's takes two or three steps
TIGHT = (
    f"sampler.vllm.max_num_batched_tokens={BUDGET}",
    f"sampler.vllm.max_num_seqs={BUDGET}",
    "sampler.max_model_len=256",
    "sampler.vllm.kv_cache_bytes=393216",
)


@pytest.fixture(params=["vllm-untied"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tight_engine(models: dict[str, Model], local_ray: str) -> Iterator[Engine]:
    """An engine with a token budget below a prompt and a KV cache that not all requests fit in."""
    engine = start_actor(open_model(models["untied"].folder, *TIGHT), "vllm", 1)
    asyncio.run(engine.client.start())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
async def tight(tight_engine: Engine, learner: Learner) -> Engine:
    """The tight engine with the same weights as the ample one."""
    await tight_engine.serve(learner, version=0)
    return tight_engine


async def sampled(engine: Engine, num_groups: int) -> list[TrajectoryGroup]:
    """Groups of the three kinds of prompts, each with a seed of its own, all at once."""
    prompts = engine.model.prompts
    settings = [SamplingSettings(4, TEMPERATURE, NUM_TOKENS, seed=100 * n) for n in range(num_groups)]
    asked = (engine.generate(prompts[n % len(prompts)], settings[n]) for n in range(num_groups))
    return list(await asyncio.gather(*asked))


def tokens(groups: list[TrajectoryGroup]) -> list[list[int]]:
    return [trajectory.actions.token_ids.tolist() for group in groups for trajectory in group.trajectories]


async def test_split_prefills_and_preemptions_change_no_draw(engine: Engine, tight: Engine, learner: Learner) -> None:
    expected = await sampled(engine, 9)
    found = await sampled(tight, 9)
    assert (await tight.handle.engine_load.remote()).num_preemptions > 0, "the KV cache held all requests"
    assert tokens(found) == tokens(expected)
    assert gaps(learner, tight.model, found).max() <= 2e-5


async def test_a_push_that_recomputes_requests_changes_no_draw(engine: Engine, tight: Engine, learner: Learner) -> None:
    """The same weights are pushed again and again: each push preempts all that runs, and its recomputation is split."""
    expected = await sampled(engine, 3)
    prompt, settings = tight.model.prompts[2], SamplingSettings(4, TEMPERATURE, NUM_TOKENS, seed=200)
    with tight.in_flight_requests.held(prompt, settings) as in_flight:
        running = asyncio.ensure_future(tight.generate(prompt, settings))
        for version in range(1, 6):
            await until_grown(in_flight, running)
            await tight.serve(learner, version)
        group = await running
    assert len(group.summary().tokens_by_version) > 2, "no push came in the middle"
    assert tokens([group]) == tokens(expected[2:])
    assert gaps(learner, tight.model, [group]).max() <= 2e-5
