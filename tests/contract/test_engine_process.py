"""An engine whose core is a process of its own, as on GPUs: it computes what the learner computes, dies, hangs, is
slow, and never outlives the actor that started it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from engine_cores import CoreApart
from engines import Engine, LocalSender, Model, new_learner, perturb, probe_gap, sampled_gap, start_actor, weight_sync
from fakes import FixedMembers
from waiting import wait_until

from mobula.cluster.errors import DeadlineError, EngineDiedError, RolloutError
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.changes import VersionStep
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.deploy.host.processes import ProcessId
from mobula.learner.learner import Learner

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

EXACT = 1e-5  # nat, fp32
GONE_S = 30.0
ANSWER_S = 60.0
HUNG_S = 5.0  # a call that takes longer is taken for hung
SLOW_S = 1.5
LONG = SamplingSettings(num_samples=2, temperature=1.0, max_tokens=400, seed=5)


class KillsTheCore(LocalSender):
    """The receiver's core dies when its group has met and the first bucket is due."""

    def __init__(self, learner: Learner, core: ProcessId) -> None:
        super().__init__(learner)
        self._core = core

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return replace(await super().open_transfer(epoch, num_receivers), timeout_s=HUNG_S)

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
        os.kill(self._core.pid, signal.SIGKILL)
        await super().send_weights(bucket_bytes, epoch, step)


@pytest.fixture
async def engine(local_ray: str, models: dict[str, Model]) -> AsyncIterator[Engine]:
    """An engine with the checkpoint's own weights as version 0."""
    limits = {"rollout_s": HUNG_S, "sync_s": HUNG_S, "probe_s": HUNG_S, "stop_s": HUNG_S}
    engine = start_actor(models["untied"], "vllm", 0, CoreApart, limits)
    await engine.client.start()
    yield engine
    await engine.client.close()


@pytest.fixture
async def learner(engine: Engine) -> AsyncIterator[Learner]:
    learner = new_learner(engine.model)
    await engine.serve(learner, version=0)
    yield learner
    learner.close()


async def processes(engine: Engine) -> tuple[ProcessId, ProcessId]:
    """The actor's and the core's."""
    actor, core = map(ProcessId.of, await engine.handle.processes.remote())
    assert actor is not None and core is not None
    assert actor != core
    return actor, core


async def gone(*which: ProcessId) -> None:
    await asyncio.to_thread(wait_until, lambda: not any(p.is_alive for p in which), GONE_S, lambda: which)


async def test_pushes_reach_it_a_slow_core_loses_nothing_and_one_that_hangs_is_noticed_and_ends_with_its_actor(
    engine: Engine, learner: Learner
) -> None:
    perturb(learner, seed=3)
    assert await weight_sync(engine, LocalSender(learner)).publish(1) == 1
    assert await probe_gap(engine, learner) <= EXACT
    assert await sampled_gap(engine, learner) <= EXACT

    prompt = engine.model.probe
    undisturbed = await engine.decode(prompt, max_tokens=200)
    actor, core = await processes(engine)
    os.kill(core.pid, signal.SIGSTOP)
    decoding = asyncio.ensure_future(engine.decode(prompt, max_tokens=200))
    await asyncio.sleep(SLOW_S)
    assert not decoding.done()
    os.kill(core.pid, signal.SIGCONT)
    assert np.array_equal((await decoding).actions.token_ids, undisturbed.actions.token_ids)

    os.kill(core.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match="to generate prompt"):
        await engine.client.generate(prompt, LONG)
    with pytest.raises(DeadlineError, match="to sample one token"):
        await engine.client.probe()
    os.kill(core.pid, signal.SIGCONT)
    await engine.client.probe()
    assert await engine.handle.num_in_flight.remote() == 0, "requests without a waiting caller were broken off"
    os.kill(core.pid, signal.SIGSTOP)
    await engine.client.close()
    await gone(actor, core)


async def test_a_core_that_is_killed_in_a_broadcast_is_lost_to_the_push(engine: Engine, learner: Learner) -> None:
    _, core = await processes(engine)
    members = FixedMembers(engine.client)
    sync = weight_sync(engine, KillsTheCore(learner, core), members=members)
    flying = [asyncio.ensure_future(engine.client.generate(prompt, LONG)) for prompt in engine.model.prompts]
    async with asyncio.timeout(ANSWER_S):
        assert await sync.publish(1) == 1
        [(name, error)] = members.lost.items()
        assert name == engine.client.name
        assert isinstance(error, EngineDiedError) and "the engine is dead and cannot receive version 1" in str(error)
        assert members.versions == {}
        ended = await asyncio.gather(*flying, return_exceptions=True)
        for death in [error, *ended]:
            assert isinstance(death, EngineDiedError), death
            assert f"the engine's process {core.pid} was ended by signal 9 (SIGKILL)" in str(death)
            assert death.failure.fingerprint is None, "what is ended from outside is no pattern"
        with pytest.raises(RolloutError, match="engine is dead"):
            await engine.client.join_transfer(Rendezvous("127.0.0.1", 1, 2, 2, "gloo", timeout_s=1.0), rank=1)
        with pytest.raises(RolloutError, match="the probe"):
            await engine.client.probe()
