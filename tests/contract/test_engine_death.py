"""A real engine whose core dies says so at once, and says nothing else afterwards."""

from __future__ import annotations

import asyncio

import pytest
from engines import Model, start_actor

from actors.rollout_actor import RolloutActor
from cluster.errors import MobulaError, RolloutError
from cluster.roles import SamplingSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANSWER_S = 60.0
LONG = SamplingSettings(num_samples=2, temperature=1.0, max_tokens=64, seed=5)


class Breakable(RolloutActor):
    """An engine whose core can be made to fail in its next step."""

    async def break_core(self) -> None:
        core = self._sampler._engine.engine_core._core

        def fail() -> None:
            raise RuntimeError("the device is gone")

        core.step_fn = fail


async def test_an_engine_whose_core_dies_fails_what_is_in_flight_and_every_probe_after_it(
    local_ray: str, models: dict[str, Model]
) -> None:
    engine = start_actor(models["untied"], "vllm", 0, Breakable)
    try:
        await engine.client.start()
        prompt = models["untied"].prompts[0]
        await engine.client.probe()
        flying = [asyncio.ensure_future(engine.client.generate(prompt, LONG)) for _ in range(2)]
        await engine.handle.break_core.remote()
        async with asyncio.timeout(ANSWER_S):
            ended = await asyncio.gather(*flying, return_exceptions=True)
            assert all(isinstance(error, RolloutError) for error in ended), ended
            with pytest.raises(RolloutError, match="engine failed"):
                await engine.client.generate(prompt, LONG)
            with pytest.raises(MobulaError):
                await engine.client.probe()
    finally:
        await engine.close()
