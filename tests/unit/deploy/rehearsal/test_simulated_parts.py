"""Decoder, shared cores, object store, faults, speeds and the fit to measured runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mobula.cluster.errors import PreflightError
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.configs.load import load_config
from mobula.deploy.rehearsal.simulated.engine import Decoder, DecodeSpeed, StoreLedger
from mobula.deploy.rehearsal.simulated.machine import Cores, PlannedFault, RecordedLengths, read_faults, run_virtually
from mobula.deploy.rehearsal.simulated.workers import RankTimes, SimulatedRank, SimulatedRanks
from mobula.deploy.rehearsal.speeds import MeasuredRun, Speeds, _fitted, measured_speeds

AT_ONCE = RankTimes(start_s=0, update_s=0, tokens_per_s=float("inf"), response_s=0, send_s=0, save_s=0, load_s=0)
SPEEDS = Speeds(decode_step_s=0.1, decode_sequence_s=0.0, prefill_tokens_per_s=1000, learner_tokens_per_s=1000)


async def ends_s(decoder: Decoder, groups: Sequence[Sequence[int]], prompt_tokens: int = 0) -> list[float]:
    """When each group ends, all of them begun now."""

    async def end_s(lengths: Sequence[int]) -> float:
        await decoder.decode(lengths, prompt_tokens)
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*map(end_s, groups)))


def test_a_step_takes_longer_for_each_response_in_the_batch() -> None:
    async def main() -> list[float]:
        decoder = Decoder(DecodeSpeed(step_s=1.0, sequence_s=0.5), num_slots=4)
        decoder.resume(0)
        return await ends_s(decoder, [[10], [20]])

    # Ten steps of two responses, 2 s each; then ten of one, 1.5 s each.
    assert run_virtually(main()) == pytest.approx([20.0, 35.0])


def test_a_prompt_stops_the_batch_once_for_all_siblings() -> None:
    async def main() -> list[float]:
        decoder = Decoder(DecodeSpeed(step_s=1.0, prefill_tokens_per_s=100.0), num_slots=4)
        decoder.resume(0)
        return await ends_s(decoder, [[10, 10]], prompt_tokens=300)

    assert run_virtually(main()) == pytest.approx([13.0])


def test_work_on_shared_cores_slows_all_of_it_down() -> None:
    async def main() -> tuple[float, list[float]]:
        cores = Cores(1)
        decoder = Decoder(DecodeSpeed(step_s=1.0), num_slots=1, cores=cores)
        decoder.resume(0)
        decoding = asyncio.create_task(ends_s(decoder, [[10]]))
        await asyncio.sleep(2.0)
        await cores.compute(4.0)  # half the speed for both: until 10 s
        computed_s = asyncio.get_running_loop().time()
        return computed_s, await decoding

    computed_s, decoded_s = run_virtually(main())
    assert computed_s == pytest.approx(10.0)
    assert decoded_s == pytest.approx([14.0])


def test_engines_that_end_together_leave_the_cores_to_others() -> None:
    async def main() -> float:
        cores = Cores(1)
        decoders = [Decoder(DecodeSpeed(step_s=1.0), num_slots=1, cores=cores) for _ in range(3)]
        for decoder in decoders:
            decoder.resume(0)
        await asyncio.gather(*(ends_s(decoder, [[10]]) for decoder in decoders))
        begun_s = asyncio.get_running_loop().time()
        await cores.compute(4.0)
        return asyncio.get_running_loop().time() - begun_s

    assert run_virtually(main()) == pytest.approx(4.0)


def test_groups_of_a_lost_engine_fail() -> None:
    async def main() -> list[BaseException]:
        decoder = Decoder(DecodeSpeed(step_s=1.0), num_slots=1)
        decoder.resume(0)
        calls = [asyncio.create_task(decoder.decode([5], 0)) for _ in range(2)]
        await asyncio.sleep(1.0)
        decoder.fail(RuntimeError("lost"))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    assert [str(error) for error in run_virtually(main())] == ["lost", "lost"]


def test_the_store_holds_what_is_referred_to_and_keeps_its_peak() -> None:
    class Thing:
        pass

    ledger, first, second = StoreLedger(), Thing(), Thing()
    ledger.hold(first, "a", 10)
    ledger.hold(first, "a", 10)
    ledger.hold(second, "a", 5)
    assert ledger.used["a"] == ledger.peak["a"] == 15
    del first
    gc.collect()
    assert (ledger.used["a"], ledger.peak["a"]) == (5, 15)


def test_recorded_lengths_are_drawn_from_the_record_and_cut() -> None:
    lengths = RecordedLengths([3, 5, 900], 100, seed=0)
    drawn = {n for index in range(50) for n in lengths.of(str(index), 4).tolist()}
    assert drawn == {3, 5, 100}
    assert (lengths.of("0", 4) == lengths.of("0", 4)).all()


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("node_loss:node-1@3", PlannedFault("node_loss", 3, "node-1", 2.0)),
        ("slow_node@2x1.5+60s", PlannedFault("slow_node", 2, "", 1.5, 60.0)),
        ("full_disk@4", PlannedFault("full_disk", 4)),
    ],
)
def test_a_fault_is_read(word: str, fault: PlannedFault) -> None:
    assert read_faults([word]) == (fault,)


@pytest.mark.parametrize("word", ["fire@3", "node_loss", "node_loss@x"])
def test_another_fault_is_refused_by_name(word: str) -> None:
    with pytest.raises(PreflightError, match=word.partition("@")[0]):
        read_faults([word])


def test_speeds_are_stated_by_name() -> None:
    assert SPEEDS.with_words(["decode_step_s=0.5"]).decode_step_s == 0.5
    for words in (["decode_step=1"], ["decode_step_s=fast"], ["learner_tokens_per_s=0"]):
        with pytest.raises(PreflightError, match=words[0].partition("=")[0]):
            SPEEDS.with_words(words)


def test_a_fit_finds_the_parts_of_a_sum_and_none_below_zero() -> None:
    rows = [[10.0, 1.0], [20.0, 1.0], [40.0, 1.0]]
    assert _fitted(rows, [2 * x + 3 for x, _ in rows]) == pytest.approx([2.0, 3.0])
    assert _fitted(rows, [2 * x - 1 for x, _ in rows])[1] == 0.0
    assert _fitted([[10.0, 1.0]], [5.0]) == pytest.approx([0.5, 0.0])


def test_speeds_are_those_of_the_runs_that_they_are_fitted_to() -> None:
    runs = []
    for mean_length, num_groups, num_ranks in ((16, 32, 2), (48, 32, 2), (48, 16, 2), (48, 32, 1)):
        config = load_config(["experiment=digits", "resources=laptop", f"resources.learner.num_workers={num_ranks}"])
        num_responses = 8 * num_groups
        tokens = num_responses * (mean_length + 100) / num_ranks
        sampled = num_responses * mean_length / num_ranks
        seconds = {
            "wait_for_rollouts": mean_length * (0.01 + 1e-4 * num_responses / 2) + 0.1,  # of two engines
            "update": 1e-4 * tokens + 5e-5 * sampled + 0.2 + 0.15 * (num_ranks > 1),
            "reference": 5e-5 * num_responses * (mean_length + 100),
            "weight_sync": 0.05,
            "other": 0.3,
        }
        runs.append(MeasuredRun(config, seconds, 0.45, num_responses, mean_length))
    speeds = measured_speeds(runs, prompt_tokens=100)
    assert speeds.exchange_s == pytest.approx(0.15)
    assert speeds.update_s == pytest.approx(0.2)
    assert 1 / speeds.learner_tokens_per_s == pytest.approx(1e-4)
    assert speeds.learner_response_s == pytest.approx(5e-5)
    assert (speeds.push_s, speeds.settle_s, speeds.step_s) == pytest.approx((0.05, 0.4, 0.3))
    assert (speeds.decode_step_s, speeds.decode_sequence_s) == pytest.approx((0.01, 1e-4))


def test_pushes_and_the_driver_take_time_from_other_work_on_the_cores() -> None:
    async def run() -> float:
        loop, cores = asyncio.get_running_loop(), Cores(1)
        ranks = SimulatedRanks(replace(AT_ONCE, send_s=1.0), 1, Manifest(()), cores)
        await asyncio.gather(SimulatedRank(ranks, 0).send_weights(1, 0), cores.compute(1.0))
        return loop.time()

    assert run_virtually(run()) == pytest.approx(2.0)
