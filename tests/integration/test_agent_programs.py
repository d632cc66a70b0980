"""`mobula train` on agent programs with real engines: the calls of a program are trained, and its reward goes up."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

import pytest
from agent_program import write_program
from jobs import Job
from verifiers_tasksets import NEEDS_VERIFIERS, PYTHON, write_tasksets

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 20
COMMON = (
    "policy=tiny_qwen2_5_vl", "data=environment", "rewards=environment", "resources=laptop",
    "resources.rollout.num_workers=1", f"num_steps={NUM_STEPS}", "evaluation.split=test", "evaluation.num_prompts=8",
    "environment.num_train=2", "environment.options.num_validation=1", "environment.options.num_test=1",
    "environment.max_tokens=200", "data.max_pixels=50176", "data.max_prompt_tokens=400", "sampler.max_tokens=6",
    "algorithm.samples_per_prompt=8", "algorithm.prompts_per_step=8", "algorithm.drop_uniform_groups=false",
    "learner.learning_rate=1e-3",
)  # fmt: skip
SMALL = ("metrics.progress=false", "timeouts.start_s=500", "resources.object_store_bytes=268435456")


def trained(folder: Path, *words: str) -> RunFolder:
    with Job(folder, (*COMMON, *words), SMALL) as job:
        job.finish(job.start())
        return read_run_folder(job.run_folder)


def check(report: RunFolder) -> None:
    assert report.summary is not None
    assert (report.summary.status, report.summary.version) == ("done", NUM_STEPS)
    assert report.summary.logprob_gap_max <= 1e-3
    assert all(record.values["turns_mean"] == 2 for record in report.steps)
    rewards = [record.values["reward_mean"] for record in report.steps]
    assert mean(rewards[-5:]) > mean(rewards[:2]) + 0.2, rewards


def test_a_program_of_ones_own_is_trained(tmp_path: Path) -> None:
    options = write_program(tmp_path)
    command = f"environment.options.command=[{sys.executable},{tmp_path / 'agent.py'}]"
    check(trained(tmp_path, "environment=program", command, f"environment.options.tasks={options['tasks']}"))


@NEEDS_VERIFIERS
def test_an_agent_of_verifiers_is_trained(tmp_path: Path) -> None:
    folder = write_tasksets(tmp_path)
    words = ("environment.options.env.taskset.id=mobula-letters", f"environment.options.import_path=[{folder}]")
    check(trained(tmp_path, "environment=verifiers", f"environment.options.python={PYTHON}", *words))
