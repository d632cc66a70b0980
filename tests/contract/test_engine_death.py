"""A real engine whose core dies ends what is in flight at once, and names the core's exception; with the core as a
thread of the actor and as a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_cores import ANY, MESSAGE, Poisoned, PoisonedApart
from engines import Model, start_actor

from mobula.cluster.errors import EngineDiedError
from mobula.cluster.roles import SamplingSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANSWER_S = 60.0
LONG = SamplingSettings(num_samples=2, temperature=1.0, max_tokens=64, seed=5)


@pytest.mark.parametrize("role", [Poisoned, PoisonedApart], ids=["thread", "process"])
async def test_what_is_in_flight_when_a_core_dies_and_all_that_comes_later_ends_with_the_cores_exception(
    role: type[Poisoned], local_ray: str, models: dict[str, Model]
) -> None:
    engine = start_actor(models["untied"], "vllm", 0, role)
    try:
        await engine.client.start()
        prompt = models["untied"].prompts[0]
        await engine.client.probe()
        flying = [asyncio.ensure_future(engine.client.generate(prompt, LONG)) for prompt in models["untied"].prompts]
        await engine.handle.poison.remote(ANY)
        async with asyncio.timeout(ANSWER_S):
            ended = await asyncio.gather(*flying, return_exceptions=True)
            calls = engine.client.generate(prompt, LONG), engine.client.probe()
            later = await asyncio.gather(*calls, return_exceptions=True)
        for error in [*ended, *later]:
            assert isinstance(error, EngineDiedError), error
            assert error.failure.summary == f"RuntimeError: {MESSAGE}"
            assert "in execute_unless_poisoned" in error.failure.frames[0]
            assert "run_busy_loop" in error.failure.traceback
        assert len({error.failure.fingerprint for error in ended}) == 1
        assert "\n" not in str(ended[0]) and MESSAGE in str(ended[0])
    finally:
        await engine.close()


class NoRoom(PoisonedApart):
    """Its KV cache is too small for a single response."""

    async def start(self) -> None:
        self._sampler._settings = replace(self._sampler._settings, kv_cache_bytes=1024)
        await super().start()


async def test_settings_that_a_core_refuses_are_named_in_its_words(local_ray: str, models: dict[str, Model]) -> None:
    engine = start_actor(models["untied"], "vllm", 0, NoRoom)
    try:
        with pytest.raises(ValueError, match="No available memory for the cache blocks"):
            await engine.client.start()
    finally:
        await engine.close()
