"""After a push every engine computes what the learner computes; one that cannot be right is refused or ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import (
    TEMPERATURE,
    AlteredManifest,
    Engine,
    LocalSender,
    dropped,
    gaps,
    learner_logprobs,
    perturb,
    probe_gap,
    refusal,
    restore,
    sampled_gap,
    until_grown,
    weight_sync,
)
from fakes import FixedMembers, pushes_of
from one_learner import copied

from mobula.cluster.errors import CanaryError, WeightSyncError, WorkerDiedError
from mobula.cluster.records.trajectory import TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.changes import VersionStep
from mobula.cluster.weight_sync.manifest import TensorSpec
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.learner.learner import Learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXACT = 1e-5  # nat, fp32
VISIBLE = 1e-2  # nat: a change of weights that a comparison cannot miss


@pytest.fixture(params=["vllm-untied", "vllm-tied", "huggingface"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_the_engine_computes_what_the_learner_computes_at_every_version(engine: Engine, learner: Learner) -> None:
    sync, weights_a = weight_sync(engine, LocalSender(learner)), copied(learner)
    pushes = pushes_of(sync)
    for version, seed in enumerate((11, 12, None), start=1):
        if seed is None:
            restore(learner, weights_a)
        else:
            perturb(learner, seed)
        assert await probe_gap(engine, learner) > VISIBLE, "before the push the engine has other weights"
        assert await sync.publish(version) == version
        assert await probe_gap(engine, learner) <= EXACT
        assert await sampled_gap(engine, learner) <= EXACT
    assert [push.version for push in pushes] == [1, 2, 3]
    assert all(push.canary_gap <= EXACT for push in pushes)
    assert {push.num_bytes for push in pushes} == {learner.manifest().num_bytes}


async def test_an_image_is_seen_with_the_vision_tower_of_the_newest_push(engine: Engine, learner: Learner) -> None:
    sync = weight_sync(engine, LocalSender(learner))
    before = await engine.client.prompt_logprobs(engine.model.probe)
    await sampled_gap(engine, learner)  # fills the caches of prefixes and of images
    perturb(learner, seed=5, only="visual.")
    await sync.publish(1)
    after = await engine.client.prompt_logprobs(engine.model.probe)
    assert np.abs(after - before).max() > VISIBLE
    assert await probe_gap(engine, learner) <= EXACT
    assert await sampled_gap(engine, learner) <= EXACT


async def test_prompts_that_need_the_weights_of_a_push_wait_for_them(engine: Engine, learner: Learner) -> None:
    sync = weight_sync(engine, LocalSender(learner))
    await sync.publish(1)
    perturb(learner, seed=7)
    settings = SamplingSettings(4, TEMPERATURE, 8, seed=3, min_version=2)
    early = asyncio.ensure_future(engine.generate(engine.model.probe, settings))
    running = [early]

    def send(version: int) -> None:
        running.extend(asyncio.ensure_future(engine.generate(p, settings)) for p in engine.model.prompts)

    sync.on_announced.append(send)
    await engine.sample(engine.model.probe)  # the engine is busy with the old weights, and asked for
    assert not early.done()
    await sync.publish(2)
    groups = await asyncio.gather(*running)
    assert [set(group.summary().tokens_by_version) for group in groups] == [{2}] * 4
    assert gaps(learner, engine.model, groups).max() <= EXACT


@pytest.mark.parametrize("engine_name", ["vllm-tied"])
async def test_an_engine_samples_on_until_a_push_has_arrived_or_failed(engine: Engine, learner: Learner) -> None:
    class Slow(LocalSender):
        error: Exception | None = None

        async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
            return replace(await super().open_transfer(epoch, num_receivers), timeout_s=5.0)

        async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
            self.meanwhile = await engine.sample(engine.model.probe)
            if self.error is not None:
                raise self.error
            await super().send_weights(bucket_bytes, epoch, step)

    sender = Slow(learner)
    sync = weight_sync(engine, sender)
    perturb(learner, seed=51)
    await sync.publish(1)
    assert set(sender.meanwhile.summary().tokens_by_version) == {0}
    assert set((await engine.sample(engine.model.probe)).summary().tokens_by_version) == {1}
    sender.error = WorkerDiedError("learner/0 died")
    with pytest.raises(WorkerDiedError, match="learner/0 died"):
        await sync.publish(2)
    assert set((await engine.sample(engine.model.probe)).summary().tokens_by_version) == {1}
    assert await probe_gap(engine, learner) <= EXACT


async def pushed_within(
    engine: Engine, learner: Learner
) -> tuple[TrajectoryGroup, dict[int, dict[str, torch.Tensor]], list[float]]:
    """A group that saw pushes while it was sampled, the weights of each version, and the largest log-prob difference of
    what was sampled of the same prompt and image after each push, beside it."""
    sync = weight_sync(engine, LocalSender(learner), canary_interval=0)
    weights, beside = {0: copied(learner)}, []
    prompt = engine.model.prompts[2]  # long enough to fill a block of KV, which later requests would share
    assert prompt.num_tokens > engine.model.config.sampler.vllm.block_size
    running = asyncio.ensure_future(engine.sample(prompt, num_samples=16, max_tokens=400))
    while not running.done() and len(weights) < 8:
        version = len(weights)
        perturb(learner, seed=version)
        weights[version] = copied(learner)
        await sync.publish(version)
        new = await engine.sample(prompt)
        beside.append(float(gaps(learner, engine.model, [new]).max()))
    return await running, weights, beside


@pytest.mark.parametrize("engine_name", ["vllm-tied"])
async def test_an_engine_that_keeps_kv_lends_old_kv_to_no_later_request(engine: Engine, learner: Learner) -> None:
    group, weights, beside = await pushed_within(engine, learner)
    assert max(beside) <= 10 * EXACT, "requests of the same prompt and image see the new weights alone"
    expected = expected_logprobs(learner, engine, group, weights)
    differences = [np.abs(e - t.behavior_logprobs) for e, t in zip(expected, group.trajectories, strict=True)]
    first, later = [], []
    for trajectory, difference in zip(group.trajectories, differences, strict=True):
        end = trajectory.weight_spans[0].end
        first += difference[:end].tolist()
        later += difference[end:].tolist()
    assert max(first) <= 10 * EXACT
    assert max(later) > VISIBLE, "later tokens see earlier ones through the KV of old weights"


@pytest.mark.parametrize("engine_name", ["vllm-untied"])
async def test_a_push_within_a_response_leaves_an_exact_boundary_in_it(engine: Engine, learner: Learner) -> None:
    """Running responses are frozen, go on with the new weights, and every token is one of the version it claims."""
    group, weights, beside = await pushed_within(engine, learner)
    assert max(beside) <= 10 * EXACT
    mixed = [t for t in group.trajectories if len(t.weight_spans) > 1]
    assert mixed, f"no response saw a push: {[t.weight_spans for t in group.trajectories]}"
    for trajectory in group.trajectories:
        ends = [span.end for span in trajectory.weight_spans]
        assert [span.start for span in trajectory.weight_spans] == [0, *ends[:-1]]
        assert ends[-1] == trajectory.num_steps
        versions = [span.version for span in trajectory.weight_spans]
        assert versions == sorted(set(versions))
    expected = expected_logprobs(learner, engine, group, weights)
    for trajectory, ours in zip(group.trajectories, expected, strict=True):
        assert np.abs(ours - trajectory.behavior_logprobs).max() <= 10 * EXACT


def expected_logprobs(
    learner: Learner, engine: Engine, group: TrajectoryGroup, weights: dict[int, dict[str, torch.Tensor]]
) -> list[np.ndarray]:
    """The learner's log-prob of each token with the weights of the version that the token claims."""
    expected = [np.full(t.num_steps, np.nan, dtype=np.float32) for t in group.trajectories]
    for version, tensors in weights.items():
        restore(learner, tensors)
        scored = learner_logprobs(learner, [group], engine.model.distribution)
        for ours, (trajectory, logprobs) in zip(expected, scored, strict=True):
            is_of_version = trajectory.weight_versions == version
            ours[is_of_version] = logprobs[is_of_version]
    return expected


@pytest.mark.parametrize("engine_name", ["huggingface"])
async def test_without_interruption_a_group_ends_before_new_weights_come(engine: Engine, learner: Learner) -> None:
    sync = weight_sync(engine, LocalSender(learner))
    await sync.publish(1)
    prompt, settings = engine.model.probe, SamplingSettings(4, TEMPERATURE, 100, seed=7)
    with engine.in_flight_requests.held(prompt, settings) as in_flight:
        running = asyncio.ensure_future(engine.generate(prompt, settings))
        await until_grown(in_flight, running)
        assert not running.done()
        await sync.publish(2)
        old = await running
    new = await engine.sample(prompt)
    assert set(old.summary().tokens_by_version) == {1}
    assert set(new.summary().tokens_by_version) == {2}


async def test_a_late_joiner_gets_the_weights_by_the_store_and_takes_part(engine: Engine, learner: Learner) -> None:
    sender, members = LocalSender(learner), FixedMembers()
    sync = weight_sync(engine, sender, members=members)
    perturb(learner, seed=21)
    learner.version = 7
    assert await sync.admit(engine.client) == 7
    members.add(engine.client)
    assert await engine.client.weight_version() == 7
    assert await probe_gap(engine, learner) <= EXACT
    perturb(learner, seed=22)
    assert await probe_gap(engine, learner) > VISIBLE
    await sync.publish(8)
    assert await probe_gap(engine, learner) <= EXACT
    assert (sender.num_opened, sender.num_sent) == (1, 1)


def retyped(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return (*tensors[:3], replace(tensors[3], dtype="bfloat16"), *tensors[4:])


@pytest.mark.parametrize(("alter", "message"), [(dropped, "missing {third}"), (retyped, "{third} is bfloat16")])
async def test_what_does_not_fit_is_refused_by_name_before_a_byte_is_sent(
    engine: Engine, learner: Learner, alter: Callable[..., Any], message: str
) -> None:
    """Of each kind of misfit: tests/unit/cluster/weight_sync/test_manifest.py."""
    sender = AlteredManifest(learner, alter)
    before = await engine.client.prompt_logprobs(engine.model.probe)
    assert message.format(third=learner.manifest().tensors[3].name) in await refusal(engine, sender)
    np.testing.assert_array_equal(await engine.client.prompt_logprobs(engine.model.probe), before)


class SwappedBytes(LocalSender):
    """A sender that puts two tensors of one shape under each other's names: no manifest can tell."""

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
        true = copied(self.learner)
        first, second = twins(true)
        restore(self.learner, true | {first: true[second], second: true[first]})
        await super().send_weights(bucket_bytes, epoch, step)
        restore(self.learner, true)


def twins(tensors: dict[str, torch.Tensor]) -> tuple[str, str]:
    """The first two matrices of one shape."""
    by_shape: dict[torch.Size, str] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.shape in by_shape:
            return by_shape[tensor.shape], name
        by_shape[tensor.shape] = name
    raise AssertionError("all matrices differ in shape")


async def test_the_canary_finds_two_tensors_of_one_shape_in_each_others_place(engine: Engine, learner: Learner) -> None:
    with pytest.raises(CanaryError, match=rf"{engine.client.name} by .*engine and learner compute otherwise"):
        await weight_sync(engine, SwappedBytes(learner)).publish(1)


async def test_a_receiver_that_never_comes_ends_the_push_in_time(engine: Engine, learner: Learner) -> None:
    class OneTooMany(LocalSender):
        async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
            opened = await super().open_transfer(epoch, num_receivers)
            return replace(opened, world_size=opened.world_size + 1, timeout_s=3.0)

    sender, started = OneTooMany(learner), time.monotonic()
    with pytest.raises(WeightSyncError, match="transfer epoch 1"):
        await weight_sync(engine, sender).publish(1)
    assert time.monotonic() - started < 20
    assert sender.num_sent == 0
    assert await probe_gap(engine, learner) <= EXACT, "it still serves what it served"
    assert await engine.client.weight_version() == 0
    perturb(learner, seed=31)
    await weight_sync(engine, LocalSender(learner)).publish(2)
    assert await probe_gap(engine, learner) <= EXACT, "the next push meets in a group of its own"


class Silent(LocalSender):
    """Reports that it has sent what never arrives."""

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return replace(await super().open_transfer(epoch, num_receivers), timeout_s=3.0)

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
        self.num_sent += 1


async def test_an_engine_that_got_nothing_is_given_what_the_learner_has(engine: Engine, learner: Learner) -> None:
    perturb(learner, seed=43)
    members = FixedMembers(engine.client)
    assert await weight_sync(engine, Silent(learner), members=members).publish(1) == 1
    assert members.versions == {engine.client.name: learner.version} and not members.lost
    assert await probe_gap(engine, learner) <= EXACT
    assert await sampled_gap(engine, learner) <= EXACT


async def test_a_sender_that_dies_ends_the_push_until_a_reload(engine: Engine, learner: Learner) -> None:
    class Dead(Silent):
        async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
            raise WorkerDiedError("learner/0 died")

    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match="learner/0 died"):
        await weight_sync(engine, Dead(learner)).publish(1)
    assert time.monotonic() - started < 20
    perturb(learner, seed=41)
    await engine.serve(learner, version=2)
    assert await engine.client.weight_version() == 2
    assert await probe_gap(engine, learner) <= EXACT
    assert await sampled_gap(engine, learner) <= EXACT
