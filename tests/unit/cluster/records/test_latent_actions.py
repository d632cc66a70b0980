"""Denoising steps in the records: cut and joined, on their way and on disk they stay the same."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from latent_data import SIGMAS, assert_same_actions, latent_actions, latent_group, latent_prompt, sampled

from mobula.actors.rollout.actor import MediaBatcher, RolloutActor
from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.arrow import SCHEMA, from_batch, record_batch, to_batch, to_rows
from mobula.cluster.records.media import MediaReader, ProcessedMedia
from mobula.cluster.records.partial_response import NOTHING, Attempt, SampledSequence
from mobula.cluster.records.trajectory import Prompt, Reward
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests

PROMPT = latent_prompt("71", negative="")


@pytest.mark.parametrize("cut", range(5))
def test_steps_cut_anywhere_and_joined_are_the_same(cut: int) -> None:
    whole = sampled(latent_actions(0, num_steps=4))
    joined = whole.until(cut).followed_by(whole.since(cut))
    assert_same_actions(joined.actions, whole.actions)
    assert (joined.weight_spans, joined.finish_reason, joined.images) == (whole.weight_spans, "stop", (b"png",))
    assert whole.until(cut).images == ()
    assert_same_actions(NOTHING.followed_by(whole).actions, whole.actions)


def test_steps_without_their_latents_or_outside_of_the_schedule_are_refused() -> None:
    whole = latent_actions(0)
    with pytest.raises(ValueError, match="3 latents, 3 step indices and 3 timesteps"):
        LatentActions(whole.latents[:3], whole.step_index, whole.timesteps, SIGMAS)
    with pytest.raises(ValueError, match=r"steps \[0, 1, 2\] do not lie in a schedule of 2"):
        replace(whole, sigmas=SIGMAS[:3])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_a_group_arrives_as_it_left_and_its_latents_are_not_copied(dtype: type) -> None:
    left = latent_group(PROMPT, [latent_actions(0, dtype=dtype), latent_actions(1, first=1, dtype=dtype)])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(left, protocol=5, buffer_callback=buffers.append)
    sent = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    for trajectory in left.trajectories:
        assert sum(np.shares_memory(trajectory.actions.latents, array) for array in sent) == 1
    arrived = pickle.loads(data, buffers=buffers)
    for ours, theirs in zip(arrived.trajectories, left.trajectories, strict=True):
        assert_same_actions(ours.actions, theirs.actions)
        assert (ours.response, ours.weight_spans) == (theirs.response, theirs.weight_spans)


def test_the_bytes_of_a_group_are_those_of_its_arrays() -> None:
    actions = latent_actions(0)
    latents, index, times, sigmas, logprobs, mask = 4 * 16 * 4, 3 * 4, 3 * 4, 5 * 4, 3 * 4, 3
    summary = latent_group(PROMPT, [actions, actions]).summary()
    assert summary.num_bytes == 2 * (latents + index + times + sigmas + logprobs + mask)
    assert (summary.num_tokens, summary.num_prompt_tokens, summary.tokens_by_version) == (6, 0, {0: 6})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_a_group_comes_back_from_arrow_as_it_was(dtype: type) -> None:
    group = latent_group(PROMPT, [latent_actions(0, dtype=dtype), latent_actions(1, first=1, dtype=dtype)])
    rewards = (Reward(0.5, {"ocr": 0.5}), None)
    of_journal = to_batch(group, rewards)
    references = [np.zeros(3, dtype=np.float32)] * 2
    for batch in (of_journal, record_batch(to_rows(group, rewards, references, step=3))):
        assert batch.schema == SCHEMA
        back = from_batch(batch)
        assert (back.rewards, back.group.prompt.media, back.group.prompt.media_spans) == (
            rewards,
            PROMPT.media,
            PROMPT.media_spans,
        )
        for ours, theirs in zip(back.group.trajectories, group.trajectories, strict=True):
            assert_same_actions(ours.actions, theirs.actions)
            np.testing.assert_array_equal(ours.behavior_logprobs, theirs.behavior_logprobs)


class Denoiser:
    """A sampler that returns the same two siblings for every prompt, whole."""

    def coming(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def sample(self, prompt: Prompt, media: Sequence[ProcessedMedia], *others: Any) -> list[SampledSequence]:
        assert [medium.modality for medium in media] == ["condition", "condition"]
        return [sampled(latent_actions(0)), sampled(latent_actions(1))]


class Actor(RolloutActor):
    """A rollout actor around a `Denoiser`, without a tokenizer."""

    def __init__(self) -> None:
        self._sampler, self._tokenizer = Denoiser(), None
        self._media = MediaBatcher(MediaReader(timeout_s=1, max_items=2))


async def test_a_rollout_actor_makes_a_group_of_denoising_steps_with_images_and_no_text() -> None:
    settings = SamplingSettings(num_samples=2, temperature=1.0, max_tokens=3, seed=0)
    attempt = InFlightRequests(chunk_tokens=4).of(PROMPT, settings).next_attempt()
    group, (summary, responses) = await Actor().generate(PROMPT, settings, attempt)
    assert [t.response.images for t in group.trajectories] == [(b"png",)] * 2
    assert [t.response.text for t in group.trajectories] == ["", ""]
    assert_same_actions(group.trajectories[1].actions, latent_actions(1))
    assert (summary.num_tokens, responses) == (6, None)  # images do not travel with a message


def test_an_attempt_after_a_loss_begins_at_the_noise() -> None:
    settings = SamplingSettings(num_samples=2, temperature=1.0, max_tokens=3, seed=0)
    request = InFlightRequests(chunk_tokens=4).of(PROMPT, settings)
    attempts: list[Attempt] = [request.next_attempt(), request.next_attempt()]
    assert [attempt.siblings for attempt in attempts] == [(), ()]
    assert attempts[0].request_id != attempts[1].request_id
