"""Benchmarks: ratios, claims and reports; the table of recipes grows by one run at a time."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import NUM_SAMPLES, NUM_TOKENS, FakeRollouts, make_prompt

from benchmarks import recipes
from benchmarks.harness.fan_out import RANK, adapters_of
from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, Side, interleave, rates, serial_rate
from benchmarks.harness.report import Report, problems, read, target_text, write
from benchmarks.harness.role_time import Process, idle_shares
from benchmarks.recipes import Result, main
from benchmarks.recovery import windows
from benchmarks.rollout import Sides
from benchmarks.step_breakdown import share
from benchmarks.weight_sync import MIB, transformer_manifest
from benchmarks.whole_step import NUM_WARMUP_STEPS, PROMPTS, SAMPLES, STEPS_A_BLOCK, STEPS_AFTER_PAUSE, Blocks
from mobula.cluster.metrics.step_records import StepRecord
from mobula.configs.load import load_config


def series(*values: float, unit: str = "samples/s") -> Measurements:
    return Measurements("what was done", unit, values)


def findings(*claims: Claim) -> Findings:
    return Findings({"threads": 1}, {"ours": series(90.0, 95.0), "raw": series(100.0)}, claims)


def step(**seconds: float) -> StepRecord:
    return StepRecord(1, {**seconds, "total": sum(seconds.values())}, {}, {}, {}, {})


def test_the_ratio_is_that_of_the_medians() -> None:
    assert rates(series(80.0, 90.0, 400.0), series(100.0, 50.0, 101.0)) == pytest.approx(0.9)


def test_rates_of_different_units_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="samples/s and GB/s"):
        rates(series(1.0), series(1.0, unit="GB/s"))


def test_parts_in_a_row_are_slower_than_the_slowest() -> None:
    assert serial_rate((400.0, 400.0)) == pytest.approx(200.0)
    assert serial_rate((300.0, 600.0)) == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("ratio", "target", "at_least", "holds"),
    [
        (0.9, 0.9, True, True),
        (0.89, 0.9, True, False),
        (0.1, 0.1, False, True),
        (0.11, 0.1, False, False),
        (0.0, None, True, True),
    ],
)
def test_a_claim_holds_on_its_side_of_a_target(ratio: float, target: float | None, at_least: bool, holds: bool) -> None:
    assert Claim("a / b", ratio, target, at_least).holds is holds


@pytest.mark.parametrize(("at_least", "worse", "better"), [(True, 0.7, 2.0), (False, 1.3, 0.1)])
def test_worse_is_away_from_the_good_side(at_least: bool, worse: float, better: float) -> None:
    baseline = Claim("a / b", 1.0, 0.5, at_least)
    assert replace(baseline, ratio=worse).is_worse_than(baseline, tolerance=0.15)
    assert not replace(baseline, ratio=better).is_worse_than(baseline, tolerance=0.15)
    assert not replace(baseline, ratio=0.9 if at_least else 1.1).is_worse_than(baseline, tolerance=0.15)


def test_what_misses_its_target_or_fell_behind_the_baseline_is_named() -> None:
    baseline = findings(Claim("a / b", 0.95, 0.5), Claim("c / d", 0.6, 0.5), Claim("information", 9.0))
    now = findings(Claim("a / b", 0.7, 0.5), Claim("c / d", 0.45, 0.46), Claim("information", 1.0))
    fell, missed, fell_too = problems(now, baseline)
    assert fell.startswith("a / b: 0.700") and "0.950" in fell
    assert missed == f"c / d: 0.450, the target is {target_text(now.claims[1])}"
    assert fell_too.startswith("c / d: 0.450, the committed baseline")


def test_a_claim_that_the_baseline_lacks_is_a_problem() -> None:
    [problem] = problems(findings(Claim("new / old", 1.0, 0.5)), findings())
    assert "new / old" in problem


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    claims = (Claim("a / b", 0.925, 0.9), Claim("e / f", 0.04, 0.1, at_least=False), Claim("information", 2.0))
    report = Report("x", "2026-01-01", "cpu", {"cores": 2, "gpus": []}, {"torch": "2"}, ("seed=1",), findings(*claims))
    write(report, tmp_path / "new" / "x.json")
    assert read(tmp_path / "new" / "x.json") == report


async def test_sides_take_turns_and_warm_up_rounds_are_thrown_away() -> None:
    order: list[tuple[str, int]] = []

    def side(name: str) -> Side:
        async def run(round_number: int) -> float:
            order.append((name, round_number))
            return float(round_number)

        return run

    found = await interleave({"a": side("a"), "b": side("b")}, Effort(repeats=2, warmups=1, num_steps=0))
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert found == {"a": (1.0, 2.0), "b": (1.0, 2.0)}


async def test_a_round_of_rollouts_samples_every_prompt_as_a_run_would_and_counts_what_came() -> None:
    rollouts, prompts = FakeRollouts(), [make_prompt("0/0/a"), make_prompt("0/1/b")]
    prepared = SimpleNamespace(config=load_config(["experiment=digits", "sampler.max_tokens=8"]))
    sides = Sides(prepared, rollouts, engine=None, rounds=[[], prompts], max_tokens=16)
    started = time.perf_counter()
    rate = await sides.ours(1)
    assert rate >= len(prompts) * NUM_SAMPLES / (time.perf_counter() - started)
    assert sides.lengths["ours"] == [NUM_TOKENS] * len(prompts)
    assert {s.max_tokens for s in rollouts.settings.values()} == {16}
    assert len({s.seed for s in rollouts.settings.values()}) == len(prompts)


def test_the_share_of_a_phase_is_over_all_steps_and_a_phase_that_did_not_run_took_nothing() -> None:
    steps = [step(update=1.0, other=0.0), step(update=1.0, checkpoint=1.5, other=0.5)]
    assert share(steps, "other") == pytest.approx(0.125)
    assert share(steps, "other", "checkpoint") == pytest.approx(0.5)
    assert share(steps, "reference") == 0.0


@pytest.mark.parametrize("size", [1, 64, 256])
def test_a_push_carries_exactly_the_bytes_that_are_broadcast(size: int) -> None:
    manifest = transformer_manifest(size * MIB)
    assert manifest.num_bytes == size * MIB
    assert len({spec.name for spec in manifest.tensors}) == len(manifest.tensors) > 5


def test_windows_are_of_steps_in_a_row_and_begin_after_the_time_that_is_given() -> None:
    done_at = [float(n) for n in range(8)]  # one step a second
    assert windows(done_at, 1.5) == [(2.0, 1.0)]
    assert windows(done_at, 2.5) == []


def test_idle_is_what_a_process_did_not_use_of_one_core_and_only_those_that_lived_throughout_count() -> None:
    first, second, dead = Process("rollout", 1, "n"), Process("rollout", 2, "n"), Process("rollout", 3, "n")
    shares = idle_shares({first: 1.0, second: 1.0, dead: 1.0}, {first: 3.0, second: 1.0}, 4.0)
    assert shares == {"rollout": pytest.approx(0.75)}


def test_a_push_of_adapters_holds_two_factors_a_matrix_and_nothing_of_vectors() -> None:
    manifest = transformer_manifest(MIB)
    matrices = [spec for spec in manifest.tensors if len(spec.shape) == 2]
    assert 0 < len(matrices) < len(manifest.tensors)
    expected = sum(4 * RANK * sum(spec.shape) for spec in matrices)
    assert adapters_of(manifest).num_bytes == expected


class DriftingMachine:
    """Raw parts that are measured faster and faster."""

    def __init__(self) -> None:
        self.factor = 0

    def measure(self) -> dict[str, float]:
        self.factor += 1
        rates = {"generate_one_core": 100.0, "generate_engine_a_core": 300.0, "train_1_threads": 150.0}
        return {part: rate * self.factor for part, rate in rates.items()}


def test_a_block_of_steps_is_compared_with_the_raw_parts_right_around_it() -> None:
    blocks = Blocks(DriftingMachine(), num_blocks=2, settle=lambda: None)
    for number in range(1, blocks.num_steps + 1):
        blocks.emit(replace(step(update=1.0), step=number, values={"num_tokens": 64.0}))
    first = NUM_WARMUP_STEPS + STEPS_AFTER_PAUSE + 1
    second = first + STEPS_A_BLOCK + STEPS_AFTER_PAUSE
    measured = [[record.step for record in block] for block in blocks.steps if block]
    assert measured == [list(range(start, start + STEPS_A_BLOCK)) for start in (first, second)]
    assert blocks.rates == pytest.approx([PROMPTS * SAMPLES] * 2)
    assert [parts["generate_one_core"] for parts in blocks.parts] == [100.0, 200.0, 300.0]
    assert blocks.limit == pytest.approx([150.0, 250.0])  # one engine on one core, midway
    assert blocks.serial == pytest.approx([1.5 * 100.0, 2.5 * 100.0])  # 1 / (1/300 + 1/150)


class Trainer:
    """Stands for `mobula train`; it fails at the run that `fails` names."""

    def __init__(self, fails: tuple[str, int] | None = None) -> None:
        self.runs: list[tuple[str, int]] = []
        self.fails = fails

    def __call__(self, name: str, seed: int, folder: Path, words: list[str]) -> Result:
        if (name, seed) == self.fails:
            raise KeyboardInterrupt
        self.runs.append((name, seed))
        return Result(name, seed, 0.5, 0.9 - 0.06 * seed, 200, 60.0, "2026-01-01", 2, tuple(words))


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(recipes, "_measured", trainer)
    return trainer


def go(tmp_path: Path, seeds: int = 2, runs: int = 1_000, names: tuple[str, ...] = ("grpo", "ppo_gae")) -> None:
    main([], list(names), seeds, tmp_path / "runs", runs, tmp_path / "recipes.json")


def test_seed_0_of_every_recipe_comes_first_and_no_run_is_measured_twice(tmp_path: Path, trainer: Trainer) -> None:
    go(tmp_path, seeds=1)
    go(tmp_path)
    assert trainer.runs == [("grpo", 0), ("ppo_gae", 0), ("grpo", 1), ("ppo_gae", 1)]
    go(tmp_path)
    assert len(trainer.runs) == 4


def test_a_stopped_command_keeps_what_was_done(tmp_path: Path, trainer: Trainer) -> None:
    trainer.fails = ("ppo_gae", 0)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert [row["recipe"] for row in json.loads((tmp_path / "recipes.json").read_text())] == ["grpo"]
    trainer.fails = None
    go(tmp_path, seeds=1)
    assert trainer.runs == [("grpo", 0), ("ppo_gae", 0)]


def test_one_run_a_command(tmp_path: Path, trainer: Trainer) -> None:
    go(tmp_path, runs=1)
    assert trainer.runs == [("grpo", 0)]
    go(tmp_path, runs=0)
    assert trainer.runs == [("grpo", 0)]


def test_the_table_has_means_and_says_which_recipe_missed_its_target(tmp_path: Path, trainer: Trainer) -> None:
    go(tmp_path)
    lines = (tmp_path / "runs" / "table.md").read_text().splitlines()
    assert lines[2] == "| `grpo` | 2 | 0.500 | 0.870 | 0.900 0.840 | 0.85 | no |"
    assert lines[3] == "| `ppo_gae` | 2 | 0.500 | 0.870 | 0.900 0.840 | 0.8 | yes |"
