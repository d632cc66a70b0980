"""The limit rises to what engines can take, falls when they cannot, and stays there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from waiting import until

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.rollout.adaptive_concurrency import AdaptiveConcurrency, AimdLimit, AimdPolicy
from mobula.cluster.rollout.staleness import StalenessGate
from mobula.cluster.runtime.vitals import EngineLoad

POLICY = AimdPolicy(
    min_groups=4, max_groups=100, increase=2, decrease=0.5, calm_kv_usage=0.6, high_kv_usage=0.9, max_waiting=8
)


def load(kv_usage: float = 0.1, waiting: int = 0, preemptions: int = 0, name: str = "rollout/0") -> EngineLoad:
    return EngineLoad(name, kv_usage, num_running=4, num_waiting=waiting, num_preemptions=preemptions)


def test_it_grows_by_a_constant_while_the_limit_holds_calm_engines_back() -> None:
    limit = AimdLimit(POLICY, start=10)
    assert [limit.observe([load()], running) for running in (10, 12, 14)] == [12, 14, 16]
    assert limit.observe([load()], num_running=15) == 16, "the limit is not what holds them back"


@pytest.mark.parametrize("busy", [load(kv_usage=0.7), load(waiting=3)])
def test_it_stays_where_engines_are_neither_calm_nor_overloaded(busy: EngineLoad) -> None:
    assert AimdLimit(POLICY, start=10).observe([load(name="rollout/1"), busy], 10) == 10


@pytest.mark.parametrize("overloaded", [load(kv_usage=0.95), load(waiting=9)])
def test_one_overloaded_engine_makes_it_fall_once_until_what_runs_is_within_it(overloaded: EngineLoad) -> None:
    limit = AimdLimit(POLICY, start=40)
    calm = load(name="rollout/1")
    assert [limit.observe([calm, overloaded], running) for running in (40, 35, 21)] == [20, 20, 20]
    assert limit.observe([calm, overloaded], 20) == 10, "the load is that of the new limit"


def test_only_new_preemptions_count_and_a_restarted_engine_has_none() -> None:
    limit = AimdLimit(POLICY, start=40)
    assert limit.observe([load(preemptions=7)], 30) == 40, "what was before the first look"
    assert limit.observe([load(preemptions=8)], 30) == 20
    assert limit.observe([load(preemptions=8)], 15) == 20
    assert limit.observe([load(preemptions=0)], 15) == 20
    assert limit.observe([load(preemptions=1)], 15) == 10


def test_it_keeps_its_bounds_and_does_not_grow_blindly() -> None:
    limit = AimdLimit(POLICY, start=1000)
    assert limit.value == 100 and limit.observe([load()], 100) == 100
    for _ in range(9):
        limit.observe([load(kv_usage=1.0)], 0)
    assert limit.value == 4
    assert limit.observe([load(), None], 4) == 4, "an engine did not report"
    assert limit.observe([], 4) == 4


@pytest.mark.parametrize("start", [4, 100])
@pytest.mark.parametrize("capacity", [20, 50])
def test_it_settles_around_what_the_engines_can_take(start: int, capacity: int) -> None:
    limit, seen = AimdLimit(POLICY, start=start), []
    for _ in range(200):
        running = limit.value
        found = load(kv_usage=min(1.0, running / capacity), waiting=max(0, running - capacity))
        seen.append(limit.observe([found], running))
    assert all(0.3 * capacity <= value <= capacity for value in seen[100:])
    assert max(seen[100:]) >= 0.5 * capacity


class Engine:
    def __init__(self, found: EngineLoad | Exception) -> None:
        self._found = found

    async def load(self) -> EngineLoad:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


async def test_the_gate_follows_and_an_engine_that_died_stops_only_the_growth() -> None:
    gate = StalenessGate(prompts_per_step=8, max_staleness=1, max_concurrent=100, total_steps=9)
    engines = [Engine(load()), Engine(WorkerDiedError("rollout/1"))]
    reported: list[tuple[int, Sequence[EngineLoad]]] = []
    adaptive = AdaptiveConcurrency(
        lambda: engines,
        gate,
        AimdLimit(POLICY, start=6),
        interval_s=0.001,
        on_limit=lambda limit, loads: reported.append((limit, loads)),
    )
    assert gate.capacity == 6
    for _ in range(6):
        gate.start()
    waiting = asyncio.ensure_future(gate.wait_for_slot())
    async with asyncio.timeout(5), adaptive.tended():
        await until(lambda: len(reported) >= 3)
        assert reported[-1] == (6, [load()]) and not waiting.done()
        engines.pop()
        await waiting
    assert gate.capacity >= 2
