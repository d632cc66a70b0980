"""The main job under loads that users have: long responses and prompts, split prefills, preemptions, pushes in flight.

A few steps of a chosen fifth of the rows run with every suite, all rows in full with `-m load`; docs/measured.md has
the last results.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import psutil
import pytest
from jobs import Job, marked, none_left
from load_model import NUM_ROWS, write_load_data, write_load_model
from rows import CHOSEN, FACTORS, FEW_STEPS, MANY_STEPS, ROWS, Row

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.replay.trajectory_log import TrajectoryLog

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(2400)]

SCRIPT = Path(__file__).with_name("load_job.py")
RESULTS = "MOBULA_LOAD_RESULTS"  # environment: append each row's figures to this file
DEADLINE_S = 2100.0
LOOK_S = 2.0
KEPT_KV_GAP_MEAN = 1e-2  # at the learning rate of these runs
MEMORY_GROWTH = 0.05  # of a run's memory between its second quarter and its last
COMMON = (
    "data=jsonl", "policy=hf", "rewards.components.0.function=job_reward:score", "learner.learning_rate=1e-6",
    "evaluation.num_prompts=4", "evaluation.interval_steps=0", "checkpoints.interval_steps=0",
    "replay.trajectory_log=true", "metrics.progress=false", "metrics.tensorboard=false", "timeouts.rollout_s=600",
    "timeouts.update_s=900", "folder={folder}/runs", "name=job", "policy.model={model}", "data.path={data}",
)  # fmt: skip


def test_every_pair_of_values_is_in_a_row() -> None:
    wanted = {
        (one, x, other, y) for one, other in combinations(FACTORS, 2) for x in FACTORS[one] for y in FACTORS[other]
    }
    found = {
        (one, getattr(row, one), other, getattr(row, other)) for row in ROWS for one, other in combinations(FACTORS, 2)
    }
    assert wanted <= found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str | int, Path]]:
    """Checkpoints by how their responses end, and data by how long their prompts are."""
    folder = tmp_path_factory.mktemp("inputs")
    found: dict[str | int, Path] = {
        "whole": write_load_model(folder / "whole", 1_000_000),
        "long tail": write_load_model(folder / "tail", 150),
    }
    for length in FACTORS["prompt_tokens"]:
        found[length] = write_load_data(folder / f"prompts-{length}", length)
    yield found


@pytest.mark.parametrize("row", [replace(ROWS[n], most_steps=FEW_STEPS) for n in CHOSEN], ids=str)
def test_a_few_steps_under_load(row: Row, inputs: dict[str | int, Path], tmp_path: Path) -> None:
    check_run(row, inputs, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_run_under_load(row: Row, inputs: dict[str | int, Path], tmp_path: Path) -> None:
    check_run(row, inputs, tmp_path)


def check_run(row: Row, inputs: dict[str | int, Path], tmp_path: Path) -> None:
    job = Job(tmp_path, ())
    memory: list[int] = []
    with job:
        job.write_reward()
        model = inputs["long tail" if row.max_tokens == 1024 else "whole"]
        common = [word.format(folder=tmp_path, model=model, data=inputs[row.prompt_tokens]) for word in COMMON]
        process = job.start_script(str(SCRIPT), row.core, *common, *row.words())
        for _ in _looks(process):
            if (job.run_folder / "metrics.jsonl").exists() and job.steps:
                memory.append(sum(_held(pid) for pid in marked(job.marks[0])))
        assert process.returncode == 0, job.output
        none_left(job.marks[0])
    found = read_run_folder(job.run_folder)
    _note(row, found, memory)
    assert found.summary is not None
    summary = found.summary
    assert (summary.status, summary.version, found.faults) == ("done", row.num_steps, [])
    last = found.steps[-1].counters
    assert (summary.restarts, last.get("rollout_retries", {}), summary.rejected) == (0, {}, {})
    assert _trained(job.run_folder) == list(range(row.num_steps * row.prompts_per_step))
    assert summary.response_length is not None
    assert summary.response_length > (75 if row.max_tokens == 1024 else 0.9 * row.max_tokens)
    assert max(summary.staleness) <= row.staleness
    assert summary.logprob_gap_mean is not None and summary.logprob_gap_max is not None
    if row.keeps_old_kv:  # how far that is from the learner's weights is a figure of the table
        assert summary.logprob_gap_mean <= KEPT_KV_GAP_MEAN
    else:
        assert summary.logprob_gap_mean <= 1e-5
        assert summary.logprob_gap_max <= 1e-3
    if row.num_steps == MANY_STEPS:
        assert _growth(memory) <= MEMORY_GROWTH, memory


def _looks(process: subprocess.Popen[str]) -> Iterator[None]:
    """Every LOOK_S until the process has ended."""
    end = time.monotonic() + DEADLINE_S
    while process.poll() is None:
        assert time.monotonic() < end, f"the run has not ended within {DEADLINE_S:g} s"
        yield
        time.sleep(LOOK_S)


def _held(pid: int) -> int:
    """Bytes that a process has for itself; what it shares, as the object store, is not counted twice."""
    try:
        found = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0
    return found.rss - found.shared


def _growth(memory: list[int]) -> float:
    """Of the mean of the last quarter over that of the second one."""
    quarter = len(memory) // 4
    if quarter < 2:
        return 0.0
    before, after = sum(memory[quarter : 2 * quarter]), sum(memory[-quarter:])
    return after / before - 1


def _trained(run_folder: Path) -> list[int]:
    """Numbers of the trained prompts in the endless sequence, sorted; a repeated one stands twice."""
    log = TrajectoryLog(run_folder / "trajectories", timeout_s=1.0)
    ids = [group.group.group_id.split("/") for step in log.steps() for group in log.read(step)]
    return sorted(int(epoch) * NUM_ROWS + int(place) for epoch, place, _ in ids)


def _note(row: Row, found: RunFolder, memory: list[int]) -> None:
    """For docs/measured.md."""
    if RESULTS not in os.environ or found.summary is None:
        return
    summary = found.summary
    drift = [step.values["logprob_drift_mean"] for step in found.steps if "logprob_drift_mean" in step.values]
    figures = {
        "steps": summary.version,
        "samples": round(row.num_steps * row.prompts_per_step * row.siblings),
        "response": summary.response_length,
        "tokens_per_s": summary.tokens_per_s,
        "gap_mean": summary.logprob_gap_mean,
        "gap_max": summary.logprob_gap_max,
        "drift": max(drift, default=0.0),
        "staleness": max(summary.staleness),
        "restarts": summary.restarts,
        "memory_mb": round(max(memory, default=0) / 2**20),
        "growth": _growth(memory),
        "wall_s": summary.wall_s,
    }
    with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
        file.write(json.dumps({"row": str(row), **figures}) + "\n")
