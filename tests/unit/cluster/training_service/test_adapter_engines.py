"""Engines of the training service on a real pool: adapters on each engine, or one set of whole weights at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import SETTINGS, make_group, make_prompt
from runs import release
from waiting import until

from mobula.cluster.errors import RolloutError, WorkerDiedError
from mobula.cluster.records.trajectory import Generated, Prompt, TrajectoryGroup
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.training_service.engines import (
    PackedWeights,
    PooledAdapterEngines,
    SampleLimits,
    Slots,
    SwappedEngines,
)
from mobula.cluster.training_service.interfaces import SampleCall
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.workers.status import RestartPolicy

POLICY = RestartPolicy(max_restarts=3, window_s=1000, backoff_s=0.001, max_backoff_s=0.01)
HEALTH = HealthChecks(interval_s=0.001, probe_interval_s=1000, max_failures_in_a_row=3, no_worker_s=5)
LIMITS = SampleLimits(max_model_len=8, num_token_ids=50, max_in_flight=4, counts_sequences=True, object_s=1)
PROMPT = make_prompt("0/0/s0")
FOLDER = Path("/adapters/one")


class FakeEngine:
    """One process. `dies_of` names what kills it: `load`, `sample`, or nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.adapters: dict[str, Path] = {}
        self.dies_of = ""
        self.refuses: set[str] = set()
        self.is_dead = False
        self.num_calls = 0
        self.asked: list[tuple[Prompt, SamplingSettings]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None: ...

    async def serve(self, adapter: str, folder: Path) -> None:
        await asyncio.sleep(0)
        self._die_of("load")
        if adapter in self.refuses:
            raise ValueError(f"adapter {adapter!r} does not fit")
        self.adapters[adapter] = folder

    async def withdraw(self, adapter: str) -> None:
        if adapter not in self.adapters:
            raise ValueError(f"adapter {adapter!r} is not served")
        del self.adapters[adapter]

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        self.num_calls += 1
        self._use(settings.adapter)
        self.asked.append((prompt, settings))
        await self.gate.wait()
        self._die_of("sample")
        whole = make_group(prompt)
        group = TrajectoryGroup(prompt, (whole.trajectories * settings.num_samples)[: settings.num_samples])
        return Generated(group, group.summary())

    async def score_prompt(self, prompt: Prompt, adapter: str | None, num_top: int) -> PromptScores:
        self._use(adapter)
        num = prompt.num_tokens - 1
        return PromptScores(np.full(num, -0.5, dtype=np.float32), [[(1, -0.1)] * num_top] * num)

    async def is_alive(self) -> None:
        if self.is_dead:
            raise WorkerDiedError(f"{self.name} died")

    async def weight_version(self) -> int:
        return -1

    async def close(self) -> None: ...

    def _use(self, adapter: str | None) -> None:
        assert adapter is None or adapter in self.adapters, f"{self.name} samples before it has {adapter}"

    def _die_of(self, cause: str) -> None:
        if self.is_dead or self.dies_of == cause:
            self.is_dead = True
            raise WorkerDiedError(f"{self.name} died")


class Bench:
    """A pool of fake engines, remembered in order of their starts."""

    def __init__(self, num: int, prepare: Callable[[FakeEngine, int], None], kind: type[FakeEngine]) -> None:
        self.made: list[Any] = []
        self.retried: Counter[str] = Counter()
        self.pool = RolloutPool(
            self.spawn, num, release=release, policy=POLICY, health=HEALTH, on_lost=lambda kind: None
        )
        self._prepare, self._kind = prepare, kind

    async def spawn(self, index: int) -> FakeEngine:
        engine = self._kind(f"rollout/{index}")
        self._prepare(engine, len(self.made))
        self.made.append(engine)
        return engine

    def count_retry(self, kind: str) -> None:
        self.retried[kind] += 1


@asynccontextmanager
async def engines_of(
    num: int, prepare: Callable[[FakeEngine, int], None] = lambda engine, nth: None, kind: type[FakeEngine] = FakeEngine
) -> AsyncIterator[tuple[PooledAdapterEngines, Bench]]:
    bench = Bench(num, prepare, kind)
    retries = RetryingRollouts(bench.pool, InFlightRequests(8), max_retries=2, on_retry=bench.count_retry)
    engines = PooledAdapterEngines(bench.pool, retries, LIMITS)
    await bench.pool.start()
    async with bench.pool.tended():
        yield engines, bench
    await bench.pool.close()


def call(adapter: str | None = "one", num_samples: int = 2, **own: object) -> SampleCall:
    return SampleCall(PROMPT, replace(SETTINGS, num_samples=num_samples), adapter, **own)  # type: ignore[arg-type]


async def test_an_adapter_is_served_on_every_engine_and_calls_go_to_the_least_loaded() -> None:
    async with engines_of(2) as (engines, bench):
        await engines.serve("one", FOLDER)
        assert [engine.adapters for engine in bench.made] == [{"one": FOLDER}] * 2
        for engine in bench.made:
            engine.gate.clear()
        running = [asyncio.ensure_future(engines.sample(call(name))) for name in ("one", None)]
        await until(lambda: [engine.num_calls for engine in bench.made] == [1, 1])
        for engine in bench.made:
            engine.gate.set()
        for result in await asyncio.gather(*running):
            assert len(result.samples) == 2
            assert result.samples[0].stop_reason == "stop"
            assert (result.prompt_logprobs, result.top_prompt_tokens) == (None, None)


async def test_scores_of_a_prompt_are_aligned_with_its_tokens() -> None:
    async with engines_of(1) as (engines, _):
        await engines.serve("one", FOLDER)
        result = await engines.sample(call(has_prompt_logprobs=True, num_top_prompt_tokens=2))
        assert result.prompt_logprobs is not None
        assert np.isnan(result.prompt_logprobs[0])
        assert result.prompt_logprobs[1:].tolist() == [-0.5, -0.5]
        assert result.top_prompt_tokens == [(), [(1, -0.1)] * 2, [(1, -0.1)] * 2]


async def test_a_lost_call_runs_again_and_its_restarted_engine_has_the_adapters_before_its_first_call() -> None:
    def prepare(engine: FakeEngine, nth: int) -> None:
        engine.dies_of = "sample" if nth == 0 else ""

    async with engines_of(1, prepare) as (engines, bench):
        await engines.serve("one", FOLDER)
        await engines.serve("two", FOLDER)
        result = await engines.sample(call("two"))
        assert len(result.samples) == 2
        assert bench.retried == {"WorkerDiedError": 1}
        first, second = bench.made
        assert second.adapters == {"one": FOLDER, "two": FOLDER}
        assert first.asked == second.asked, "the same seed, from the first token"


async def test_an_engine_that_dies_while_it_loads_an_adapter_gets_it_after_its_restart() -> None:
    def prepare(engine: FakeEngine, nth: int) -> None:
        engine.dies_of = "load" if nth == 0 else ""

    async with engines_of(2, prepare) as (engines, bench):
        await engines.serve("one", FOLDER)
        await until(lambda: len(bench.made) == 3 and "one" in bench.made[2].adapters)


async def test_an_adapter_that_kills_every_engine_is_given_up_and_harms_no_other() -> None:
    deadly = Path("/adapters/deadly")

    class Killed(FakeEngine):
        async def serve(self, adapter: str, folder: Path) -> None:
            self.dies_of = "load" if folder == deadly else ""
            await super().serve(adapter, folder)

    async with engines_of(1, kind=Killed) as (engines, _):
        await engines.serve("one", FOLDER)
        with pytest.raises(RolloutError, match="engines were lost while they loaded adapter 'deadly'"):
            await engines.serve("deadly", deadly)
        assert len((await engines.sample(call("one"))).samples) == 2
        with pytest.raises(ValueError, match="adapter 'deadly' is not served"):
            await engines.sample(call("deadly"))


async def test_an_adapter_that_one_engine_refuses_is_served_on_none() -> None:
    def prepare(engine: FakeEngine, nth: int) -> None:
        engine.refuses = {"one"} if nth == 1 else set()

    async with engines_of(2, prepare) as (engines, bench):
        with pytest.raises(ValueError, match="does not fit"):
            await engines.serve("one", FOLDER)
        assert [engine.adapters for engine in bench.made] == [{}, {}]
        await engines.serve("two", FOLDER)
        with pytest.raises(ValueError, match="adapter 'two' exists"):
            await engines.serve("two", FOLDER)


async def test_a_withdrawn_adapter_is_gone_from_every_engine() -> None:
    async with engines_of(2) as (engines, bench):
        await engines.serve("one", FOLDER)
        await engines.withdraw("one")
        assert [engine.adapters for engine in bench.made] == [{}, {}]
        for call_of in (engines.sample(call("one")), engines.withdraw("one")):
            with pytest.raises(ValueError, match=r"adapter 'one' is not served \(served: none\)"):
                await call_of


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "a prompt has 1 to 7 tokens, got 0"),
        ([1] * 8, "a prompt has 1 to 7 tokens, got 8: sampler.max_model_len=8"),
        ([1, 50], "token id 50 of the prompt is not in 0 .. 49"),
        ([-1], "token id -1 of the prompt is not in 0 .. 49"),
    ],
)
async def test_a_prompt_that_does_not_fit_reaches_no_engine(ids: list[int], message: str) -> None:
    array = np.array(ids, dtype=np.int32)
    async with engines_of(1) as (engines, bench):
        with pytest.raises(ValueError, match=message):
            await engines.sample(replace(call(None), prompt=replace(PROMPT, compact_ids=array, expanded_ids=array)))
        assert bench.made[0].num_calls == 0


async def test_a_response_ends_with_the_models_longest_sequence_and_greedy_samples_are_drawn_once() -> None:
    async with engines_of(1) as (engines, bench):
        greedy = replace(SETTINGS, temperature=0.0, num_samples=3, max_tokens=100)
        result = await engines.sample(SampleCall(PROMPT, greedy, stop_token_ids=(4,)))
        [(_, settings)] = bench.made[0].asked
        assert (settings.num_samples, settings.max_tokens, settings.stop_token_ids) == (1, 5, (4,))
        assert len(result.samples) == 3


async def test_calls_wait_for_slots_in_their_order() -> None:
    async with engines_of(1) as (engines, bench):
        [engine] = bench.made
        engine.gate.clear()
        running = [asyncio.ensure_future(engines.sample(call(None, num_samples=n))) for n in (2, 4, 1)]
        await until(lambda: engine.num_calls == 1)
        await asyncio.sleep(0.01)
        assert engine.num_calls == 1, "4 sequences do not fit beside 2, and later calls do not overtake"
        engine.gate.set()
        results = await asyncio.gather(*running)
        assert [len(result.samples) for result in results] == [2, 4, 1]


async def test_a_cancelled_wait_for_slots_leaves_its_place() -> None:
    slots, order = Slots(2), []

    async def work(name: str, num: int, ends: asyncio.Event) -> None:
        async with slots.held(num):
            order.append(name)
            await ends.wait()

    end = asyncio.Event()
    tasks = [asyncio.create_task(work(name, num, end)) for name, num in (("a", 1), ("b", 9), ("c", 1))]
    await asyncio.sleep(0)
    assert order == ["a"]
    tasks[1].cancel()
    await until(lambda: order == ["a", "c"])
    end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(1), slots.held(2):
        pass


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
    """Engines that hold one set of whole weights at a time; `dies_of` kills the first one."""

    def prepare(engine: FakeEngine, nth: int) -> None:
        engine.dies_of = dies_of if nth == 0 else ""

    async with engines_of(num, prepare, WholeEngine) as (pooled, bench):
        engines = SwappedEngines(pooled, bench.pool, lambda folder: PackedWeights(Manifest(()), 1, [str(folder)]), BASE)
        for name in ("one", "two"):
            await engines.serve(name, Path(f"/{name}"))
        yield engines, bench.made


async def test_calls_of_other_weights_wait_for_the_running_ones_and_run_in_order() -> None:
    async with swapped(1) as (engines, [engine]):
        engine.gate.clear()
        running = [
            asyncio.ensure_future(engines.sample(call(name, num_samples=1))) for name in ("one", "one", "two", None)
        ]
        await until(lambda: engine.num_calls == 2)
        await asyncio.sleep(0.01)
        assert engine.num_calls == 2, "the calls of `one` run together, the others wait"
        engine.gate.set()
        await asyncio.gather(*running)
        assert engine.sampled == ["/one", "/one", "/two", str(BASE)]
        await engines.withdraw("two")
        with pytest.raises(ValueError, match=r"'two' are not served \(served: one\)"):
            await engines.sample(call("two", num_samples=1))


@pytest.mark.parametrize("cause", ["load", "sample"])
async def test_an_engine_that_is_lost_is_replaced_by_one_with_the_same_weights(cause: str) -> None:
    async with swapped(1, dies_of=cause) as (engines, made):
        result = await engines.sample(call("one", num_samples=1))
        assert len(result.samples) == 1
        assert len(made) == 2
        assert made[1].sampled == ["/one"]


async def test_every_engine_has_the_weights() -> None:
    async with swapped(2) as (engines, made):
        for engine in made:
            engine.gate.clear()
        running = [asyncio.ensure_future(engines.sample(call("two", num_samples=1))) for _ in range(2)]
        await until(lambda: [engine.num_calls for engine in made] == [1, 1])
        for engine in made:
            engine.gate.set()
        await asyncio.gather(*running)
        assert [engine.sampled for engine in made] == [["/two"], ["/two"]]
