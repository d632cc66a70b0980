"""Rehearsals, and their simulated parts."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.configs.load import load_config
from mobula.deploy.rehearsal.command import RehearseCommand, rehearse
from mobula.deploy.rehearsal.roles import SimulatedRank, SimulatedRanks
from mobula.deploy.rehearsal.simulated.engine import Decoder, DecodeSpeed, StoreLedger
from mobula.deploy.rehearsal.simulated.machine import Cores, PlannedFault, RecordedLengths, read_faults, run_virtually
from mobula.deploy.rehearsal.speeds import MeasuredRun, Speeds, _fitted, measured_speeds

WORDS = (
    "experiment=own", "resources=multi_node", "policy.tiny=qwen2.5-vl", "policy.model=not-there",
    "algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4", "evaluation.num_prompts=4",
    "sampler.max_tokens=128",
)  # fmt: skip

STATED = ("decode_step_s=0.02", "learner_tokens_per_s=500", "start_s=10", "update_s=1", "reward_s=0")


def page(tmp_path: Path, *words: str, base: Sequence[str] = WORDS, nodes: str = "2x8x80GB", **options: object) -> dict:
    """The page as JSON."""
    file = tmp_path / "page.json"
    arguments = {"words": STATED, "prompt_tokens": 100, "num_steps": 6, "with_gains": False, **options}
    command = RehearseCommand(overrides=[*base, *words], nodes=nodes, json_file=file, **arguments)
    rehearse(command, Console(quiet=True))
    return json.loads(file.read_text())


def test_a_synchronous_step_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    stated = (*STATED, "exchange_s=0.4", "step_s=0.25", "push_s=0.2", "settle_s=0.3")
    found = page(tmp_path, "algorithm.max_staleness=0", mean_tokens=50, sigma=0.0, words=stated)
    assert found["result"]["staleness"] == {"0": 1.0}
    # 8 prompts on 8 engines: 50 steps; 32 rows of 150 tokens on 8 ranks.
    phases = found["result"]["phases"]
    assert phases["update"] == pytest.approx(1 + 0.4 + 32 * 150 / 8 / 500)
    assert phases["other"] == pytest.approx(0.25)
    speeds = found["speeds"]
    decoding_s = 50 * (speeds["decode_step_s"] + 4 * speeds["decode_sequence_s"]) + 100 / speeds["prefill_tokens_per_s"]
    assert phases["weight_sync"] == pytest.approx(0.2, rel=0.02)
    assert phases["wait_for_rollouts"] == pytest.approx(0.3 - 0.25 + decoding_s, rel=0.02)  # engines load meanwhile
    assert 0 < found["result"]["driver"]["measured_s"] < 5


def test_staleness_takes_the_waits_away_and_stays_within_its_bound(tmp_path: Path) -> None:
    waits = {}
    for bound in (0, 2):
        found = page(tmp_path, f"algorithm.max_staleness={bound}", mean_tokens=100, num_steps=10)
        waits[bound] = found["wait_share"]
        assert max(map(int, found["result"]["staleness"])) <= bound
    assert waits[2] < waits[0] / 2


def test_a_larger_size_and_the_gain_of_each_role_are_on_the_page(tmp_path: Path) -> None:
    found = page(tmp_path, mean_tokens=100, factors=(1, 2), with_gains=True)
    assert [(size["num_engines"], size["num_ranks"]) for size in found["sizes"]] == [(8, 8), (16, 16)]
    assert found["gains"][0]["gain"] > 0


def test_an_engine_that_is_lost_with_its_node_is_replaced_and_the_run_ends_as_planned(tmp_path: Path) -> None:
    words = ("resources.num_nodes=2", "timeouts.start_s=3000")
    found = page(tmp_path, *words, mean_tokens=100, faults=("preemption:node-1@2+20",))
    assert len(found["played"]["steps"]) == 6
    assert any("preemption of node-1" in event for event in found["played"]["events"])
    assert found["played"]["counters"]["restarts"]


@pytest.mark.parametrize(("node", "roles"), [("node-0", {"learner"}), ("node-1", {"rollout", "reference", "reward"})])
def test_all_workers_of_a_lost_node_go_on_elsewhere(tmp_path: Path, node: str, roles: set[str]) -> None:
    words = ("timeouts.start_s=3000", "algorithm.kl.coef=0.01")
    found = page(tmp_path, *words, nodes="4x8x80GB", mean_tokens=100, faults=(f"node_loss:{node}@2",))
    played = found["played"]
    assert (played["error"], len(played["steps"])) == ("", 6)
    [lost] = [event for event in played["events"] if "are lost" in event]
    assert {name.partition("/")[0] for name in lost.partition("are lost: ")[2].split(", ")} == roles
    assert sum(played["counters"]["restarts"].values()) >= len(roles)
    seconds = [step["seconds"]["total"] for step in played["steps"]]
    assert max(seconds) > found["speeds"]["start_s"], "the start of new workers takes its time"


def test_a_lost_node_without_a_spare_one_ends_the_run_by_name(tmp_path: Path) -> None:
    found = page(tmp_path, "timeouts.start_s=60", mean_tokens=100, faults=("node_loss:node-0@2",))
    assert "the learner has no place" in found["played"]["error"]
    assert 1 <= len(found["played"]["steps"]) < 6


def test_a_sweep_ends_at_a_size_that_takes_too_long_here(tmp_path: Path) -> None:
    found = page(tmp_path, mean_tokens=100, factors=(1, 2), size_s=0.001)
    assert found["sizes"] == []
    assert "x1 and larger sizes are unknown: ended after 0.001 s here" in found["sizes_ended"]


def test_the_object_store_of_the_drivers_node_overflows_at_a_size(tmp_path: Path) -> None:
    words = ("resources.object_store_bytes=100000000", "algorithm.max_staleness=1")
    media = {"media_tokens": 64, "media_bytes": 1_000_000}
    found = page(tmp_path, *words, mean_tokens=50, factors=(1, 16), **media)
    small, large = found["sizes"]
    assert small["broken"] == []
    assert any(limit.startswith("object store of node-0") for limit in large["broken"])


def test_a_full_disk_ends_the_run_with_its_error(tmp_path: Path) -> None:
    found = page(tmp_path, "checkpoints.interval_steps=2", faults=("full_disk@2",))
    assert "No space left on device" in found["played"]["error"]


@pytest.mark.slow
def test_256_engines_and_512_ranks_are_played_in_a_minute_of_cpu_time(tmp_path: Path) -> None:
    started = time.process_time()
    sizes = {"rollout": 256, "learner": 512, "reference": 0}
    words = ["algorithm.max_staleness=1", *(f"resources.{role}.num_workers={num}" for role, num in sizes.items())]
    many = ("algorithm.prompts_per_step=512", "algorithm.max_concurrent_groups=1024")
    overrides = tuple(word for word in WORDS if not word.startswith("algorithm.prompts_per_step"))
    found = page(tmp_path, *words, *many, mean_tokens=100, base=overrides, nodes="96x8x80GB")
    assert len(found["played"]["steps"]) == 6
    assert sum(found["result"]["staleness"].values()) == pytest.approx(1)
    assert time.process_time() - started < 60


def test_work_of_ray_in_the_driver_grows_with_the_size_alone(tmp_path: Path) -> None:
    found = page(tmp_path, mean_tokens=20, sigma=0.0, factors=(1, 32))
    shares = [size["result"]["driver"]["ray_s"] / size["num_ranks"] for size in found["sizes"]]
    assert shares[1] < 1.1 * shares[0]


def test_the_speeds_of_a_cpu_are_not_guessed(tmp_path: Path) -> None:
    command = RehearseCommand(overrides=[WORDS[0], "resources=laptop", *WORDS[2:]], prompt_tokens=100)
    with pytest.raises(PreflightError, match="--measured"):
        rehearse(command, Console(quiet=True))


NO_TIME = {"decode_step_s": 0.0, "decode_sequence_s": 0.0, "start_s": 0.0}
AT_ONCE = Speeds(**NO_TIME, prefill_tokens_per_s=float("inf"), learner_tokens_per_s=float("inf"))
SPEEDS = Speeds(decode_step_s=0.1, decode_sequence_s=0.0, prefill_tokens_per_s=1000, learner_tokens_per_s=1000)


async def ends_s(decoder: Decoder, groups: Sequence[Sequence[int]], prompt_tokens: int = 0) -> list[float]:
    """When each group ends, all of them begun now."""

    async def end_s(lengths: Sequence[int]) -> float:
        await decoder.decode(lengths, prompt_tokens)
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*map(end_s, groups)))


@pytest.mark.parametrize(
    ("speed", "groups", "prompt_tokens", "ends"),
    [
        # ten steps of two responses, 2 s each; then ten of one, 1.5 s each
        pytest.param({"sequence_s": 0.5}, [[10], [20]], 0, [20.0, 35.0], id="longer with each response in the batch"),
        pytest.param({"prefill_tokens_per_s": 100.0}, [[10, 10]], 300, [13.0], id="one stop for a prompt of siblings"),
    ],
)
def test_a_batch_is_decoded_in_steps(speed: dict, groups: list[list[int]], prompt_tokens: int, ends: list) -> None:
    async def main() -> list[float]:
        decoder = Decoder(DecodeSpeed(step_s=1.0, **speed), num_slots=4)
        decoder.resume(0)
        return await ends_s(decoder, groups, prompt_tokens)

    assert run_virtually(main()) == pytest.approx(ends)


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
        ranks = SimulatedRanks(replace(AT_ONCE, push_s=1.0), 1, Manifest(()), cores)
        await asyncio.gather(SimulatedRank(ranks, 0).send_weights(1, 0), cores.compute(1.0))
        return loop.time()

    assert run_virtually(run()) == pytest.approx(2.0)
