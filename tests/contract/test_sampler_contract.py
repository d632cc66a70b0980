"""Every engine samples from the very distribution that the learner computes, and reports exactly what it did."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import TEMPERATURE, Engine, gaps, restore, score
from one_learner import copied

from mobula.cluster.records.trajectory import FinishReason, Prompt, Trajectory, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.learner.learner import Learner
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.head import PLAIN, Distribution
from mobula.learner.policies.token import PolicyOutput

pytestmark = [pytest.mark.core, pytest.mark.slow, pytest.mark.timeout(900)]

LOVE = 40.0  # logit of a rigged token; the others lie within about 5 of 0


@pytest.fixture(params=["vllm-untied", "huggingface"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


async def sample_all(engine: Engine, **settings: int) -> list[TrajectoryGroup]:
    """A group of every kind of prompt, all at once."""
    return list(await asyncio.gather(*(engine.sample(prompt, **settings) for prompt in engine.model.prompts)))


def tokens(group: TrajectoryGroup) -> list[list[int]]:
    return [trajectory.actions.token_ids.tolist() for trajectory in group.trajectories]


def everything(groups: list[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def rig(learner: Learner, engine: Engine, token_id: int) -> None:
    """Make the model sample `token_id` after every prompt: the token's output row is solved for that."""
    head = learner.policy.model.get_output_embeddings()
    states: list[torch.Tensor] = []  # before the output layer, [1, H] a prompt
    hook = head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].detach().double()))
    for prompt in engine.model.prompts:
        policy_output(learner, prompt, [token_id], PLAIN)
    hook.remove()
    loved = torch.full((len(states), 1), LOVE, dtype=torch.float64)
    with torch.no_grad():
        head.weight[token_id] = torch.linalg.lstsq(torch.cat(states), loved).solution[:, 0].float()


def policy_output(
    learner: Learner, prompt: Prompt, token_ids: Sequence[int], distribution: Distribution
) -> PolicyOutput:
    """The output of the learner's policy for a response."""
    return score(learner, [TokenSequence.of_response(prompt, np.array(token_ids, dtype=np.int32))], distribution)


async def test_the_learner_scores_cuts_and_hot_first_tokens_as_sampled(engine: Engine, learner: Learner) -> None:
    """Ratios at equal weights are 1 over the same kept sets, and far from it over all tokens."""
    cut = SamplingSettings(4, TEMPERATURE, 12, seed=7, top_p=0.8, top_k=20, min_p=0.001, keeps_sets=True)
    for settings in (cut, replace(cut, first_token_temperature=4.0)):
        distribution = replace(engine.model.distribution, first_token_temperature=settings.first_token_temperature)
        for prompt in engine.model.prompts:
            found = await engine.generate(prompt, settings)
            rows = [(t.actions.token_ids, t.actions.kept) for t in found.trajectories]
            replayed = score(learner, [TokenSequence.of_response(prompt, *row) for row in rows], distribution)
            plain = score(learner, [TokenSequence.of_response(prompt, ids) for ids, _ in rows], distribution)
            off = []
            for n, trajectory in enumerate(found.trajectories):
                behaviour, length = trajectory.behavior_logprobs, trajectory.num_steps
                assert np.abs(replayed.logprobs[n, :length].numpy() - behaviour).max() < 2e-5
                off.append(np.abs(plain.logprobs[n, :length].numpy() - behaviour).max())
            assert max(off) > 0.05


async def test_a_stop_string_ends_a_response_and_its_token_ids_are_those_without_it(engine: Engine) -> None:
    settings = SamplingSettings(4, TEMPERATURE, 24, seed=7)
    plain = await engine.generate(engine.model.probe, settings)
    [stop] = [t.response.text[6:8] for t in plain.trajectories if t.response.text[6:8].isascii()][:1]
    for chosen in (replace(settings, stop_strings=(stop,)), replace(settings, stop_strings=("never sampled", stop))):
        found = await engine.generate(engine.model.probe, chosen)
        assert FinishReason.STOP_STRING in {t.finish_reason for t in found.trajectories}
        for before, after in zip(plain.trajectories, found.trajectories, strict=True):
            length = after.num_steps
            assert after.actions.token_ids.tolist() == before.actions.token_ids[:length].tolist()
            assert not after.response.is_truncated or after.finish_reason is FinishReason.LENGTH
            ended = after.finish_reason is FinishReason.STOP_STRING
            assert ended == (stop in after.response.text) == (stop in before.response.text)


async def test_a_stop_string_may_be_a_special_token(engine: Engine, learner: Learner) -> None:
    tag = "<|im_start|>"
    [token_id] = engine.model.processor.tokenize(tag).tolist()
    rig(learner, engine, token_id)
    await engine.serve(learner, version=1)
    settings = SamplingSettings(4, TEMPERATURE, 12, seed=7, stop_strings=(tag,))
    for trajectory in (await engine.generate(engine.model.probe, settings)).trajectories:
        assert trajectory.actions.token_ids.tolist() == [token_id]
        assert (trajectory.finish_reason, trajectory.response.text) == (FinishReason.STOP_STRING, tag)


async def test_one_request_gives_as_many_siblings_as_asked_for(engine: Engine) -> None:
    for group in await sample_all(engine, num_samples=6):
        assert len(group.trajectories) == 6
        assert len({tuple(sibling) for sibling in tokens(group)}) > 1, "siblings are samples, not copies"
        assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}#{n}" for n in range(6)]


async def test_logprobs_are_the_learners_own_on_text_one_and_two_images_mixed(engine: Engine, learner: Learner) -> None:
    groups = await sample_all(engine, num_samples=8)
    found = gaps(learner, engine.model, groups)
    assert found.size > 100
    assert found.mean() <= 1e-6
    assert found.max() <= 2e-5


@pytest.mark.parametrize("engine_name", [pytest.param("vllm-tied", marks=pytest.mark.exhaustive), "huggingface"])
async def test_the_load_is_that_of_the_requests_under_way(engine: Engine) -> None:
    before = await engine.handle.engine_load.remote()
    sizes = {"num_samples": 40, "max_tokens": 300} if engine.kind == "vllm" else {"num_samples": 4, "max_tokens": 50}
    running = [asyncio.ensure_future(engine.sample(prompt, **sizes)) for prompt in engine.model.prompts]
    seen = []
    while not all(task.done() for task in running):
        seen.append(await engine.handle.engine_load.remote())
        await asyncio.sleep(0.01)
    groups = await asyncio.gather(*running)
    idle = await engine.handle.engine_load.remote()
    assert idle.num_tokens - before.num_tokens == sum(t.num_steps for t in everything(groups))
    assert (idle.num_running, idle.num_waiting) == (0, 0)
    assert max(load.num_waiting for load in seen) > 0, "more is asked for than it decodes at a time"
    if engine.kind == "huggingface":
        assert max(load.num_running for load in seen) == 1
        return
    assert max(load.num_running for load in seen) == engine.model.config.sampler.vllm.max_num_seqs == 64
    assert max(load.kv_usage for load in seen) > idle.kv_usage >= 0
    assert idle.num_preemptions == 0, "its KV cache holds them all"


async def test_logprobs_depend_on_the_image(engine: Engine, learner: Learner) -> None:
    """Without this the comparison above could be one of two policies that see nothing."""
    asked = engine.model.probe
    other = replace(asked, media=engine.model.prompts[2].media[:1])
    ours = [learner.sequence_logprobs(prompt) for prompt in (asked, other)]
    assert np.abs(ours[0] - ours[1]).max() > 1e-3
    for prompt, expected in zip((asked, other), ours, strict=True):
        np.testing.assert_allclose(await engine.client.prompt_logprobs(prompt), expected, atol=1e-5)


async def test_a_response_that_ran_out_of_tokens_is_of_reason_length_and_has_no_eos(engine: Engine) -> None:
    short = await engine.sample(engine.model.probe, num_samples=8, max_tokens=3)
    assert FinishReason.LENGTH in {t.finish_reason for t in short.trajectories}
    for trajectory in short.trajectories:
        ids = trajectory.actions.token_ids.tolist()
        has_stop = [token in engine.model.processor.eos_token_ids for token in ids]
        if trajectory.finish_reason is FinishReason.LENGTH:
            assert len(ids) == 3
            assert not any(has_stop)
            assert trajectory.response.is_truncated
        else:
            assert has_stop == [False] * (len(ids) - 1) + [True]


async def test_a_response_that_stops_ends_in_the_eos_that_it_sampled(engine: Engine, learner: Learner) -> None:
    weights = copied(learner)
    for stop_id in engine.model.processor.eos_token_ids:
        restore(learner, weights)
        rig(learner, engine, stop_id)
        await engine.serve(learner, version=1)
        groups = await sample_all(engine, num_samples=2)
        for trajectory in everything(groups):
            assert trajectory.actions.token_ids.tolist() == [stop_id]
            assert trajectory.finish_reason is FinishReason.STOP
            assert not trajectory.response.is_truncated
        assert gaps(learner, engine.model, groups).max() <= 1e-5


async def test_media_placeholders_are_never_sampled_however_likely_they_are(engine: Engine, learner: Learner) -> None:
    banned = engine.model.processor.media_token_ids
    rig(learner, engine, banned[0])
    for prompt in engine.model.prompts:
        unbanned = policy_output(learner, prompt, banned[:1], PLAIN)
        assert unbanned.logprobs.item() > -1e-3, "without a ban nothing else would be sampled"
    await engine.serve(learner, version=1)
    groups = await sample_all(engine, num_samples=8)
    greedy = [await engine.decode(prompt) for prompt in engine.model.prompts]
    for trajectory in [*everything(groups), *greedy]:
        assert not np.isin(trajectory.actions.token_ids, banned).any()
    assert gaps(learner, engine.model, groups).max() <= 1e-4  # the ban is part of the distribution on both sides


async def test_the_same_seed_gives_the_same_samples_and_another_seed_others(engine: Engine) -> None:
    first = await engine.sample(engine.model.probe, seed=3)
    again, other = [await engine.sample(engine.model.probe, seed=seed) for seed in (3, 4)]
    assert tokens(again) == tokens(first)
    assert tokens(other) != tokens(first)


async def test_temperature_zero_always_takes_the_likeliest_token(engine: Engine, learner: Learner) -> None:
    responses = await asyncio.gather(*(engine.decode(prompt) for prompt in engine.model.prompts))
    for prompt, response in zip(engine.model.prompts, responses, strict=True):
        assert policy_output(learner, prompt, response.actions.token_ids, engine.model.distribution).is_argmax.all()


async def test_every_token_has_the_version_that_sampled_it(engine: Engine, learner: Learner) -> None:
    await engine.serve(learner, version=42)
    for group in await sample_all(engine):
        for trajectory in group.trajectories:
            assert trajectory.weight_versions.tolist() == [42] * trajectory.num_steps
        assert group.summary().tokens_by_version == {42: sum(t.num_steps for t in group.trajectories)}


async def test_text_is_what_the_tokens_spell_without_special_tokens(engine: Engine) -> None:
    for trajectory in everything(await sample_all(engine)):
        ids = trajectory.actions.token_ids
        assert trajectory.response.text == engine.model.processor.decode(ids)
        assert "<|" not in trajectory.response.text
