"""Engines that hold one set of whole weights at a time, with a real pool of fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import SETTINGS
from test_adapter_engines import HEALTH, LIMITS, POLICY, PROMPT, FakeEngine
from waiting import until

from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import RolloutPool
from mobula.cluster.training_service.engines import PackedWeights, PooledAdapterEngines, SwappedEngines
from mobula.cluster.training_service.interfaces import SampleCall
from mobula.cluster.weight_sync.manifest import Manifest

BASE = Path("/base")


class WholeEngine(FakeEngine):
    """An engine that records which weights each call was sampled from."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.weights: Any = str(BASE)
        self.version = 0
        self.sampled: list[Any] = []

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        assert not self.num_running, "weights change under a running call"
        await asyncio.sleep(0)
        self._die_of("load")
        [self.weights], self.version = buckets, version

    async def weight_version(self) -> int:
        return self.version

    num_running = 0

    async def generate(self, *args: Any) -> Any:
        self.sampled.append(self.weights)
        self.num_running += 1
        try:
            return await super().generate(*args)
        finally:
            self.num_running -= 1


@asynccontextmanager
async def swapped(num: int, dies_of: str = "") -> AsyncIterator[tuple[SwappedEngines, list[WholeEngine]]]:
    """`dies_of` kills the first engine."""
    made: list[WholeEngine] = []

    async def spawn(index: int) -> WholeEngine:
        made.append(WholeEngine(f"rollout/{index}"))
        made[-1].dies_of = dies_of if len(made) == 1 else ""
        return made[-1]

    async def release(index: int) -> None: ...

    pool = RolloutPool(spawn, num, release=release, policy=POLICY, health=HEALTH, on_lost=lambda kind: None)
    retries = RetryingRollouts(pool, InFlightRequests(8), max_retries=2, on_retry=lambda kind: None)
    engines = PooledAdapterEngines(pool, retries, LIMITS)
    found = SwappedEngines(engines, pool, lambda folder: PackedWeights(Manifest(()), 1, [str(folder)]), BASE)
    for name in ("one", "two"):
        await found.serve(name, Path(f"/{name}"))
    await pool.start()
    async with pool.tended():
        yield found, made
    await pool.close()


def call(name: str | None) -> SampleCall:
    return SampleCall(PROMPT, replace(SETTINGS, num_samples=1), name)


async def test_calls_of_other_weights_wait_for_the_running_ones_and_run_in_order() -> None:
    async with swapped(1) as (engines, [engine]):
        engine.gate.clear()
        running = [asyncio.ensure_future(engines.sample(call(name))) for name in ("one", "one", "two", None)]
        await until(lambda: engine.num_calls == 2)
        await asyncio.sleep(0.01)
        assert engine.num_calls == 2, "the calls of `one` run together, the others wait"
        engine.gate.set()
        await asyncio.gather(*running)
        assert engine.sampled == ["/one", "/one", "/two", str(BASE)]
        await engines.withdraw("two")
        with pytest.raises(ValueError, match=r"'two' are not served \(served: one\)"):
            await engines.sample(call("two"))


@pytest.mark.parametrize("cause", ["load", "sample"])
async def test_an_engine_that_is_lost_is_replaced_by_one_with_the_same_weights(cause: str) -> None:
    async with swapped(1, dies_of=cause) as (engines, made):
        result = await engines.sample(call("one"))
        assert len(result.samples) == 1
        assert len(made) == 2
        assert made[1].sampled == ["/one"]


async def test_every_engine_has_the_weights() -> None:
    async with swapped(2) as (engines, made):
        for engine in made:
            engine.gate.clear()
        running = [asyncio.ensure_future(engines.sample(call("two"))) for _ in range(2)]
        await until(lambda: [engine.num_calls for engine in made] == [1, 1])
        for engine in made:
            engine.gate.set()
        await asyncio.gather(*running)
        assert [engine.sampled for engine in made] == [["/two"], ["/two"]]
