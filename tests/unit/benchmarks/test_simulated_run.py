"""Simulated runs on a clock that jumps from timer to timer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fakes import SETTINGS, make_prompt

from benchmarks.asynchrony import WORKLOAD, in_regime
from benchmarks.simulation.simulated_run import Engine, LeastLoaded, Workload, simulate
from mobula.cluster.rollout.staleness import OvertakingOrder
from mobula.deploy.rehearsal.simulated.machine import LognormalLengths, run_virtually

EQUAL = LognormalLengths(median=100, sigma=0.0, max_tokens=1000, seed=0)
TAILED = LognormalLengths(median=100, sigma=1.0, max_tokens=500, seed=0)
PAIR = replace(SETTINGS, num_samples=2)
SMALL = Workload(
    lengths=TAILED, num_siblings=2, num_engines=4, slots_per_engine=4, tokens_per_s=10.0, prompts_per_step=8,
    update_s=9.0, push_s=1.0, reference_s=0.5, reward_s=0.1, num_steps=24, num_warmup_steps=4,
)  # fmt: skip


def engine(lengths: LognormalLengths = EQUAL, num_slots: int = 2) -> Engine:
    return Engine(lengths, num_slots=num_slots, tokens_per_s=10.0)


def test_lengths_are_a_function_of_seed_and_prompt_and_end_at_the_limit() -> None:
    lengths = [TAILED.of(str(index), 2) for index in range(200)]
    assert all((TAILED.of(str(index), 2) == lengths[index]).all() for index in range(200))
    assert (replace(TAILED, seed=1).of("0", 2) != lengths[0]).any()
    longest = max(int(of.max()) for of in lengths)
    assert longest == TAILED.max_tokens
    assert set(EQUAL.of("0", 2).tolist()) == {100}


def test_a_group_that_finds_all_slots_taken_waits_for_the_one_before_it() -> None:
    async def main() -> list[float]:
        ours = engine()
        ours.decoder.resume(0)

        async def end_s(prompt_id: str) -> float:
            await ours.generate(make_prompt(prompt_id), PAIR)
            return asyncio.get_running_loop().time()

        ends = await asyncio.gather(end_s("0"), end_s("1"))
        assert ours.num_in_flight == 0
        assert ours.decoder.busy_slot_s == pytest.approx(40.0)
        assert ours.decoder.busy_s == pytest.approx(20.0)
        return ends

    assert run_virtually(main()) == pytest.approx([10.0, 20.0])


def test_a_response_stands_still_in_a_pause_and_goes_on_with_the_new_version() -> None:
    async def main() -> tuple[dict[int, int], float]:
        ours = engine()
        ours.decoder.resume(0)
        generating = asyncio.create_task(ours.generate(make_prompt("0"), PAIR))
        await asyncio.sleep(3.0)
        ours.decoder.pause()
        await asyncio.sleep(5.0)
        ours.decoder.resume(1)
        found = await generating
        return dict(found.summary.tokens_by_version), asyncio.get_running_loop().time()

    tokens, end_s = run_virtually(main())
    assert tokens == {0: 2 * 30, 1: 2 * 70}
    assert end_s == pytest.approx(15.0)


def test_nothing_is_decoded_before_the_first_weights() -> None:
    async def main() -> float:
        ours = engine()
        generating = asyncio.create_task(ours.generate(make_prompt("0"), PAIR))
        await asyncio.sleep(4.0)
        ours.decoder.resume(0)
        await generating
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(14.0)


def test_prompts_go_to_the_engine_with_the_fewest() -> None:
    async def main() -> list[int]:
        engines = [engine(num_slots=8) for _ in range(3)]
        pool = LeastLoaded(engines)
        for each in engines:
            each.decoder.resume(0)
        calls = [asyncio.create_task(pool.generate(make_prompt(str(i)), PAIR)) for i in range(7)]
        await asyncio.sleep(0)
        loads = [each.num_in_flight for each in engines]
        await asyncio.gather(*calls)
        return loads

    assert run_virtually(main()) == [3, 2, 2]


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    load = replace(SMALL, lengths=EQUAL)  # 16 responses in 16 slots, 10 s each
    found = simulate(load, max_staleness=0, max_concurrent=100)
    assert found.step_s == pytest.approx(10.0 + 0.1 + 0.5 + 9.0 + 1.0)
    assert found.learner_idle_share == pytest.approx(1 - 10.0 / 20.6)
    assert found.engine_idle_share == pytest.approx(1 - 10.0 / 20.6)
    assert (found.mean_age, found.max_age, found.mean_tokens) == (0.0, 0, 100.0)
    assert load.ideal_step_s == pytest.approx(10.0)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_bound_trains_the_same_prompts_within_it_and_never_beats_the_ideal(max_staleness: int) -> None:
    found = simulate(SMALL, max_staleness=max_staleness, max_concurrent=100)
    trained = [prompt_id for step in found.trained for prompt_id in step]
    assert sorted(trained, key=int) == [str(index) for index in range(SMALL.num_steps * SMALL.prompts_per_step)]
    assert found.max_age <= max_staleness
    assert found.step_s > 0.95 * SMALL.ideal_step_s, "the window holds other lengths than the run, a few percent off"


def test_overtaken_stragglers_get_over_age_and_the_learner_waits_less() -> None:
    load = replace(SMALL, lengths=replace(SMALL.lengths, sigma=1.5), update_s=1.0)
    waiting = simulate(load, max_staleness=1, max_concurrent=100)
    overtaking = simulate(load, max_staleness=1, max_concurrent=100, order=OvertakingOrder)
    assert waiting.max_age <= 1 < overtaking.max_age
    assert overtaking.step_s < waiting.step_s
    ids = {prompt_id for step in overtaking.trained for prompt_id in step}
    assert len(ids) == load.num_steps * load.prompts_per_step


def test_the_same_run_is_simulated_the_same_twice() -> None:
    assert simulate(SMALL, max_staleness=2, max_concurrent=10) == simulate(SMALL, max_staleness=2, max_concurrent=10)


@pytest.mark.parametrize(("sigma", "balance"), [(0.0, 0.5), (1.0, 1.6)])
def test_a_regime_keeps_the_mean_length_and_has_the_balance_asked_for(sigma: float, balance: float) -> None:
    load = in_regime(replace(WORKLOAD, num_steps=10), sigma=sigma, balance=balance)
    assert (load.update_s + load.push_s) / load.decoding_s == pytest.approx(balance)
    assert load.decoding_s == pytest.approx(6600 * 2048 / (1024 * 50), rel=0.08)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_days_of_sleep_pass_at_once_and_in_order() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, now()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 200_000.0), sleeper("early", 0.5), sleeper("later", 300_000.0))

    run_virtually(main())
    assert [name for name, _ in woken] == ["early", "late", "later"]
    assert [moment for _, moment in woken] == pytest.approx([0.5, 200_000.0, 300_000.0])


def test_a_deadline_ends_a_wait_at_its_moment() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.Event().wait()
        return now()

    assert run_virtually(main()) == pytest.approx(7.0)


def test_what_goes_to_a_thread_is_done_before_time_moves() -> None:
    async def main() -> tuple[int, float]:
        ticking = asyncio.create_task(asyncio.sleep(5.0))
        result = await asyncio.to_thread(lambda: 3)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        moment = now()
        ticking.cancel()
        return result, moment

    assert run_virtually(main()) == (3, 0.0)


def test_a_deadlock_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can happen any more"):
        run_virtually(main())
