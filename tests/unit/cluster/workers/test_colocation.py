"""Engines and learner take turns: nothing is sampled from dead weights, and the two are never awake together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import pytest
from fakes import SETTINGS, FakeLearner, make_prompt, make_scored
from hypothesis import given
from hypothesis import strategies as st

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.workers.colocation import NEXT, GpuLease, LeasedRollouts, LeasedWeights, LeaseState, Phase


@given(st.lists(st.sampled_from(["sample", "sampled", "start", "started", "begin", "end"]), max_size=60))
def test_nothing_samples_outside_the_engines_turn_nor_starts_in_the_learners(moves: list[str]) -> None:
    state, target = LeaseState(), Phase.HANDOVER
    for move in moves:
        if move == "sample" and state.may_sample:
            state.sample()
        elif move == "sampled" and state.num_sampling:
            state.sampled()
        elif move == "start" and state.may_start:
            state.start()
        elif move == "started" and state.num_starting:
            state.started()
        elif move == "begin" and not state.is_changing:
            target = NEXT[state.phase]
            state.begin(target)
        elif move == "end" and state.is_changing and state.may_change:
            state.end(target)
        assert state.num_sampling == 0 or state.phase is Phase.GENERATING
        assert state.num_starting == 0 or state.phase is not Phase.TRAINING


def test_sampling_out_of_turn_and_turns_out_of_order_are_refused() -> None:
    state = LeaseState()
    with pytest.raises(AssertionError, match="weights may be gone"):
        state.sample()
    with pytest.raises(AssertionError, match="training does not follow handover"):
        state.begin(Phase.TRAINING)
    state.begin(Phase.GENERATING)
    with pytest.raises(AssertionError, match="another change"):
        state.begin(Phase.GENERATING)
    state.end(Phase.GENERATING)
    state.sample()
    state.begin(Phase.TRAINING)
    with pytest.raises(AssertionError, match="weights may be gone"):
        state.sample()
    with pytest.raises(AssertionError, match="1 requests are in flight"):
        state.end(Phase.TRAINING)


class Device:
    """What is on it, and what happened in which order."""

    def __init__(self) -> None:
        self.here = {"weights", "kv_cache", "policy", "optimizer"}
        self.lost: list[Any] = []
        self.name = "rollout/0"
        self.dies = False
        self.arriving = 0
        self.arrived: Callable[[int], Awaitable[None]]

    def receivers(self) -> list[Any]:
        return [] if self.lost else [self]

    def lose(self, receiver: Any, error: Exception) -> None:
        self.lost.append(error)

    async def sleep(self) -> None:
        if self.dies:
            raise WorkerDiedError(self.name)
        self.here -= {"weights", "kv_cache"}

    async def wake_up(self, tag: str) -> None:
        assert not self.here & ({"optimizer"} if tag == "weights" else {"optimizer", "policy"})
        self.here.add(tag)

    async def offload(self, part: str) -> None:
        self.here.discard(part)

    async def onload(self) -> None:
        assert not self.here & {"weights", "kv_cache"} or self.lost
        self.here |= {"policy", "optimizer"}

    async def generate(self, prompt: Any, settings: Any) -> tuple[str, str]:
        for _ in range(5):
            assert self.here == {"weights", "kv_cache"} and not self.arriving
            await asyncio.sleep(0)
        return "group", "summary"

    async def publish(self, version: int) -> int:
        assert self.here == {"weights", "policy"} or version == 0, "the KV cache and the policy share no device"
        self.arriving = 3
        return version

    def settling(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def settled(self) -> None:
        while self.arriving:
            await asyncio.sleep(0)
            self.arriving -= 1
        await self.arrived(0)
        assert self.here == {"weights", "kv_cache"}, "the engines score the probe"


def lease_of(device: Device) -> GpuLease:
    lease = GpuLease(device, device)
    device.arrived = lease.arrived
    return lease


async def test_a_step_goes_round_and_requests_wait_for_the_engines_turn() -> None:
    device = Device()
    lease = lease_of(device)
    rollouts, weights = LeasedRollouts(device, lease), LeasedWeights(device, lease)
    learner = StepLearner(FakeLearner(), before=[lease.train])
    early = asyncio.ensure_future(rollouts.generate(make_prompt("0/0/s"), SETTINGS))
    await asyncio.sleep(0.01)
    assert not early.done()
    assert await weights.publish(0) == 0 and lease.phase is Phase.GENERATING
    late = asyncio.ensure_future(rollouts.generate(make_prompt("0/1/s"), SETTINGS))
    await asyncio.sleep(0)
    for version in (1, 2):
        assert (await learner.update([make_scored("0/0/s")])).version == version
        assert device.here == {"policy", "optimizer"} and lease.phase is Phase.TRAINING
        asked = asyncio.ensure_future(rollouts.generate(make_prompt("0/2/s"), SETTINGS))
        await asyncio.sleep(0.01)
        assert not asked.done(), "the engines sleep"
        assert await weights.publish(version) == version
        assert await asyncio.wait_for(asked, 5) == ("group", "summary")
    assert early.done() and late.done()


async def test_what_samples_besides_ends_before_the_engines_sleep() -> None:
    device = Device()
    lease = lease_of(device)
    rollouts = LeasedRollouts(device, lease)
    await LeasedWeights(device, lease).publish(0)

    async def evaluate() -> None:
        for n in range(3):
            await rollouts.generate(make_prompt(f"test/{n}/s"), SETTINGS)

    evaluation = asyncio.ensure_future(evaluate())
    await StepLearner(FakeLearner(), before=[lambda: evaluation, lease.train]).update([make_scored("0/0/s")])
    assert evaluation.done()


async def test_an_engine_that_dies_on_the_way_to_sleep_is_lost_and_holds_nothing_up() -> None:
    device = Device()
    lease = lease_of(device)
    await LeasedWeights(device, lease).publish(0)
    device.dies = True
    await StepLearner(FakeLearner(), before=[lease.train]).update([make_scored("0/0/s")])
    assert [type(error) for error in device.lost] == [WorkerDiedError] and lease.phase is Phase.TRAINING


async def test_an_engine_starts_while_the_learner_is_away_and_a_step_waits_for_it() -> None:
    device = Device()
    lease = lease_of(device)
    weights = LeasedWeights(device, lease)
    learner = StepLearner(FakeLearner(), before=[lease.train])
    await weights.publish(0)
    is_up = asyncio.Event()

    async def start() -> Phase:
        async with lease.starting():
            phase = lease.phase
            await is_up.wait()
        return phase

    first = asyncio.ensure_future(start())
    await asyncio.sleep(0.01)
    step = asyncio.ensure_future(learner.update([make_scored("0/0/s")]))
    second = asyncio.ensure_future(start())
    await asyncio.sleep(0.01)
    assert not step.done() and lease.phase is Phase.GENERATING, "the step needs the memory of the engine that starts"
    is_up.set()
    assert await first is Phase.GENERATING
    await step
    assert not second.done() and lease.phase is Phase.TRAINING, "the learner has the memory of an engine that starts"
    await weights.publish(1)
    assert await second is not Phase.TRAINING


async def test_engines_sleep_while_the_learner_loads_a_checkpoint() -> None:
    device = Device()
    lease = lease_of(device)
    await lease.begin()
    assert device.here == {"policy", "optimizer"} and lease.phase is Phase.TRAINING
    assert await LeasedWeights(device, lease).publish(7) == 7
    assert device.here == {"weights", "kv_cache"} and lease.phase is Phase.GENERATING
