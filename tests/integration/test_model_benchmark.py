"""`mobula benchmark-model` as a user starts it: a real model on a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import RUN_DEADLINE_S, SMALL, Job
from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.deploy.tools.model_benchmark import benchmark, latency_summary, leaders
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder of the artifacts of one real model on one engine, and the report in it."""
    folder = tmp_path_factory.mktemp("models")
    model = write_tiny_qwen2_5_vl(folder / "tiny", seed=0, tie_word_embeddings=False)
    words = [w for w in SMALL if not w.startswith(("rewards.", "evaluation."))]
    words += ["experiment=digits", f"data.path={folder / 'digits'}", f"folder={folder / 'runs'}"]
    words += [f"evaluation.num_prompts={NUM_PROMPTS}", "resources.rollout.num_workers=1"]
    job = Job(folder, ())
    options = [part for word in words for part in ("--set", word)]
    try:
        process = job.start_command("benchmark-model", f"{model}@4", "--output", str(folder / "found"), *options)
        assert process.wait(RUN_DEADLINE_S) == 0, job.output
        [path] = (folder / "found").glob("models-*.json")
        yield folder, json.loads(path.read_text())
    finally:
        job.end()


def test_the_report_holds_quality_speed_and_hardware(written: tuple[Path, dict[str, Any]]) -> None:
    folder, matrix = written
    [run] = matrix["runs"]
    assert run["model"] == str(folder / "tiny")
    assert set(matrix["leaders"].values()) == {run["model"]}
    assert run["dataset"]["num_prompts"] == NUM_PROMPTS
    generation = run["generation"]
    assert (generation["sampler"], generation["num_engines"], generation["prompts_in_flight"]) == ("vllm", 1, 4)
    assert generation["samples_per_s"] == pytest.approx(NUM_PROMPTS / generation["generate_s"], rel=0.01)
    latency = generation["sample_latency_ms"]
    assert 0 < latency["p50"] <= latency["p95"] <= latency["max"] <= 1000 * generation["generate_s"]
    assert run["usage"]["num_samples"] >= 1
    assert run["usage"]["cpu_percent_of_one_core"]["max"] > 0
    assert run["usage"]["memory_resident_mib"]["avg"] > 100
    assert 0 <= run["quality"]["low"] <= run["quality"]["accuracy"] <= run["quality"]["high"] <= 1
    assert run["quality"]["num_scored"] == NUM_PROMPTS


def test_the_records_are_the_responses_as_generated(
    written: tuple[Path, dict[str, Any]],
) -> None:
    folder, matrix = written
    [run] = matrix["runs"]
    rows = [json.loads(line) for line in (folder / "found" / run["records"]).read_text().splitlines()]
    assert len(rows) == NUM_PROMPTS
    assert all(row["reference"] and row["metadata"]["latency_ms"] > 0 for row in rows)
    assert sum(row["metadata"]["generated_tokens"] for row in rows) == run["generation"]["generated_tokens_total"]
    latencies = latency_summary([row["metadata"]["latency_ms"] for row in rows])
    assert latencies == pytest.approx(run["generation"]["sample_latency_ms"], abs=0.002)


def test_more_prompts_in_flight_than_engines_take_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="'999' prompts in flight .* algorithm.max_concurrent_groups"):
        benchmark(["model@999"], ["experiment=digits"], tmp_path / "found", Console())
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_there_is_refused_and_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="misspelt is no checkpoint folder .* set policy=hf"):
        benchmark([str(tmp_path / "misspelt")], ["experiment=digits"], tmp_path / "found", Console())
    assert list(tmp_path.iterdir()) == []


def test_percentiles_are_interpolated() -> None:
    assert latency_summary([10.0, 20.0, 30.0, 40.0]) == {"avg": 25.0, "p50": 25.0, "p95": 38.5, "max": 40.0}


def test_each_leader_is_the_best_of_its_kind() -> None:
    def run(model: str, accuracy: float, reward: float, rate: float, busy: float | None) -> dict[str, Any]:
        gpus = [] if busy is None else [{"utilization_percent": {"avg": busy, "max": 100.0}}]
        return {
            "model": model,
            "quality": {"accuracy": accuracy, "average_reward": reward},
            "generation": {"samples_per_s": rate},
            "usage": {"gpus": gpus, "cpu_percent_of_one_core": {"avg": 50.0, "max": 60.0}},
        }

    runs = [run("a", 0.5, 0.1, 3.0, 20.0), run("b", 0.5, 0.2, 1.0, 70.0), run("c", 0.4, 0.9, 4.0, 30.0)]
    assert leaders(runs) == {"best_quality": "b", "best_throughput": "c", "best_utilization": "b"}
    assert leaders([run("d", 0.1, 0.1, 1.0, None)])["best_utilization"] == "d"
    twice = [run("e", 0.5, 0.1, 3.0, 20.0), run("e", 0.5, 0.2, 1.0, 10.0)]
    for one, prompts_in_flight in zip(twice, (8, 32), strict=True):
        one["generation"]["prompts_in_flight"] = prompts_in_flight
    assert leaders(twice) == {"best_quality": "e@32", "best_throughput": "e@8", "best_utilization": "e@8"}
