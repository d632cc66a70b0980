"""The main job under loads that users have: long responses and prompts, split prefills, preemptions, pushes in flight.

Every pair of values of two factors is in at least one row. A few steps of a chosen fifth of the rows run with every
suite, all rows in full with `-m load`; docs/measured.md has the last results.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import MOBULA, Job, marked, none_left
from load_model import NUM_ROWS, write_load_data, write_load_model

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.replay.trajectory_log import TrajectoryLog

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(2400)]

APART = (str(Path(__file__).parents[1] / "integration" / "replaced_job.py"), "RolloutActor=engine_cores:CoreApart")
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


FACTORS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (8, 128, 1024),
    "prompt_tokens": (20, 600, 3000),
    "budget": ("split", "ample"),
    "kv": ("full", "ample"),
    "siblings": (1, 8, 64),
    "in_flight": (1, 64, 256),
    "staleness": (0, 1, 4),
    "kv_cache": ("recompute", "keep"),
    "payload": ("weights", "adapters"),
    "engines": (1, 2),
    "core": ("thread", "process"),
}
SPLIT_BUDGETS = {20: 16, 600: 128, 3000: 512}  # tokens an engine step, fewer than a prompt has
LONGEST_PROMPTS = {20: 64, 600: 768, 3000: 3072}
MANY_STEPS, FEW_STEPS = 50, 6
TOKENS_OF_A_RUN = 600_000  # that the learner processes at most, if that leaves FEW_STEPS
KV_BYTES_PER_TOKEN, BLOCK = 1024, 32  # of the tiny model in float32


@dataclass(frozen=True)
class Row:
    """One run. `in_flight` counts prompts; `split` and `full` are a token budget below a prompt and a KV cache that
    holds a fraction of what is in flight."""

    max_tokens: int
    prompt_tokens: int
    budget: str
    kv: str
    siblings: int
    in_flight: int
    staleness: int
    kv_cache: str
    payload: str
    engines: int
    core: str
    most_steps: int = MANY_STEPS

    def __str__(self) -> str:
        return "-".join(f"{getattr(self, name)}" for name in FACTORS)

    @property
    def keeps_old_kv(self) -> bool:
        """Whether a response goes on after a push on keys and values of the weights before it."""
        return self.kv_cache == "keep" and self.staleness > 0

    @property
    def prompts_per_step(self) -> int:
        """So many that the staleness bound lets `in_flight` prompts run at once."""
        return ceil(self.in_flight / (self.staleness + 1))

    @property
    def num_steps(self) -> int:
        """As many as TOKENS_OF_A_RUN allow."""
        length = self.prompt_tokens + min(self.max_tokens, 150)
        tokens_per_step = self.prompts_per_step * self.siblings * length
        return max(FEW_STEPS, min(self.most_steps, TOKENS_OF_A_RUN // tokens_per_step))

    @property
    def max_num_seqs(self) -> int:
        return min(128, self.max_num_batched_tokens)

    @property
    def max_num_batched_tokens(self) -> int:
        return SPLIT_BUDGETS[self.prompt_tokens] if self.budget == "split" else 8192

    @property
    def max_model_len(self) -> int:
        return ceil((LONGEST_PROMPTS[self.prompt_tokens] + self.max_tokens) / BLOCK) * BLOCK

    @property
    def kv_cache_bytes(self) -> int:
        if self.kv == "ample":
            return 1 << 29
        num_tokens = max(self.max_model_len + 4 * BLOCK, 2 * self.prompt_tokens + 2 * self.max_tokens)
        return num_tokens * KV_BYTES_PER_TOKEN

    def words(self) -> list[str]:
        """What the run is started with."""
        adapters = ["policy.lora.rank=4"] if self.payload == "adapters" else []
        return [
            "resources=laptop_overlapped", "learner=single", "warm_start=none",
            f"resources.rollout.num_workers={self.engines}", f"sampler.max_tokens={self.max_tokens}",
            f"sampler.max_model_len={self.max_model_len}",
            f"sampler.vllm.max_num_batched_tokens={self.max_num_batched_tokens}",
            f"sampler.vllm.max_num_seqs={self.max_num_seqs}", f"sampler.vllm.kv_cache_bytes={self.kv_cache_bytes}",
            f"sampler.vllm.block_size={BLOCK}", "sampler.max_images_per_prompt=11",
            f"data.max_prompt_tokens={LONGEST_PROMPTS[self.prompt_tokens]}", "data.max_pixels=262144",
            f"algorithm.samples_per_prompt={self.siblings}", f"algorithm.prompts_per_step={self.prompts_per_step}",
            f"algorithm.max_concurrent_groups={self.in_flight}", f"algorithm.max_staleness={self.staleness}",
            f"algorithm.advantage={'reinforce' if self.siblings == 1 else 'grpo'}",
            "algorithm.drop_uniform_groups=false", "algorithm.kl.coef=0", f"weight_sync.kv_cache={self.kv_cache}",
            f"weight_sync.payload={self.payload}", "weight_sync.canary_interval=1", *adapters,
            f"num_steps={self.num_steps}",
        ]  # fmt: skip


ROWS = tuple(
    Row(*values)
    for values in (
        (8, 20, "split", "ample", 1, 1, 0, "keep", "weights", 2, "thread"),
        (8, 20, "split", "full", 64, 1, 1, "recompute", "weights", 1, "thread"),
        (8, 600, "split", "full", 8, 1, 1, "keep", "adapters", 2, "thread"),
        (1024, 600, "ample", "full", 8, 1, 4, "recompute", "adapters", 1, "process"),
        (128, 20, "ample", "full", 1, 64, 1, "recompute", "weights", 1, "thread"),
        (1024, 600, "split", "ample", 1, 64, 4, "keep", "weights", 2, "process"),
        (8, 20, "ample", "ample", 8, 64, 0, "recompute", "weights", 2, "thread"),
        (128, 20, "split", "ample", 1, 256, 4, "keep", "weights", 1, "thread"),
        (128, 3000, "split", "ample", 8, 1, 1, "keep", "adapters", 2, "process"),
        (8, 20, "ample", "ample", 64, 64, 4, "recompute", "adapters", 1, "process"),
        (1024, 20, "ample", "ample", 1, 256, 1, "recompute", "adapters", 2, "thread"),
        (128, 600, "split", "full", 64, 1, 0, "recompute", "adapters", 2, "process"),
        (8, 600, "ample", "full", 1, 256, 4, "keep", "adapters", 1, "thread"),
        (8, 20, "ample", "full", 8, 256, 0, "keep", "weights", 2, "process"),
        (8, 3000, "ample", "ample", 1, 64, 4, "recompute", "adapters", 1, "process"),
        (8, 20, "split", "ample", 64, 256, 4, "recompute", "adapters", 1, "thread"),
        (1024, 3000, "ample", "full", 64, 1, 0, "keep", "weights", 1, "thread"),
        (8, 3000, "split", "ample", 1, 256, 4, "recompute", "adapters", 2, "thread"),
    )
)
CHOSEN = (2, 4, 7)  # of ROWS, in short for every run of the suite: a fifth of them
assert (*FACTORS, "most_steps") == tuple(field.name for field in fields(Row))


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


SHORT = [pytest.param(replace(ROWS[n], most_steps=FEW_STEPS), id=f"few-steps-{ROWS[n]}") for n in CHOSEN]
WHOLE = [pytest.param(row, marks=pytest.mark.exhaustive, id=str(row)) for row in ROWS]


@pytest.mark.parametrize("row", [*SHORT, *WHOLE])
def test_a_run_under_load(row: Row, inputs: dict[str | int, Path], tmp_path: Path) -> None:
    memory: list[int] = []
    with Job(tmp_path, ()) as job:
        job.write_reward()
        model = inputs["long tail" if row.max_tokens == 1024 else "whole"]
        common = [word.format(folder=tmp_path, model=model, data=inputs[row.prompt_tokens]) for word in COMMON]
        command = APART if row.core == "process" else (*MOBULA, "train")
        process = job.start_script(*command, *common, *row.words())
        for _ in _looks(process):
            if (job.run_folder / "metrics.jsonl").exists() and job.steps:
                memory.append(sum(_held(pid) for pid in marked(job.marks[0])))
        assert process.returncode == 0, job.output
        none_left(job.marks[0])
    found = read_run_folder(job.run_folder)
    _note(row, found, memory)
    summary = found.summary
    assert (summary.status, summary.version, found.faults) == ("done", row.num_steps, [])
    last = found.steps[-1].counters
    assert (summary.restarts, last.get("rollout_retries", {}), summary.rejected) == (0, {}, {})
    assert _trained(job.run_folder) == list(range(row.num_steps * row.prompts_per_step))
    assert summary.response_length > (75 if row.max_tokens == 1024 else 0.9 * row.max_tokens)
    assert max(summary.staleness) <= row.staleness
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
