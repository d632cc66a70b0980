"""A run whose reward has a judge in a worker pool of its own: a real engine that sees the images, and is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_judge
import pytest
from jobs import RUN_DEADLINE_S, SMALL, Job, marked, none_left
from waiting import wait_until

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.workers.faults import FAULTS_FILE, read_faults
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS, KILL_AFTER, WEIGHT = 8, 2, 0.25
WORKERS = {
    "num_workers": 1, "num_cpus": 0.1, "num_gpus": 0, "num_threads": 1, "bind_cores": True, "first_core": 1,
    "custom_resources": {}, "node_labels": {}, "strategy": "auto",
}  # fmt: skip


def component(name: str, function: str, weight: float, options: dict[str, Any], **fields: Any) -> dict[str, Any]:
    rest = {"service": "reward", "needs_images": False, "retries": 0, "cache_entries": 0, **fields}
    return {"name": name, "function": function, "weight": weight, "options": options, **rest}


def word(value: Any) -> str:
    """As the command line takes it: keys without quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {word(part)}" for key, part in value.items()) + "}"
    return "[" + ", ".join(map(word, value)) + "]" if isinstance(value, list) else json.dumps(value)


def job_with(folder: Path, judge: Path) -> Job:
    """Two components: the length of the answer, and the judge's choice of a digit with the image before it."""
    own = {"model": str(judge), "temperature": 1.0, "verdict": "regex:Score: (?P<score>[0-9])"}
    options = {**engine_judge.OPTIONS, **own}
    components = [
        component("odd", "job_reward:score", 1.0, {}),
        component("judge", "vllm_judge", WEIGHT, options, service="judge", needs_images=True),
    ]
    words = ("experiment=digits", "resources=laptop", "learner=single", f"data.path={folder / 'digits'}")
    words += ("resources.rollout.num_workers=1", "resources.learner.num_workers=1", f"num_steps={NUM_STEPS}")
    words += (f"rewards.components={word(components)}", "rewards.accuracy_component=odd")
    words += (f"resources.reward_services={word({'judge': WORKERS})}", "supervision.backoff_s=0.1")
    small = tuple(word for word in SMALL if not word.startswith("rewards."))
    write_tiny_qwen2_5_vl(folder / "model")
    return Job(folder, words, small=small)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_with(tmp_path, write_tiny_qwen2_5_vl(tmp_path / "judge", seed=1)) as job:
        yield job


def judge_process(job: Job) -> int:
    """The newest process of the judge's worker."""
    log = (job.run_folder / "logs" / "reward.judge-0.log").read_text()
    return int(log.rpartition("===== process ")[2].split()[0])


def test_a_judge_scores_every_response_and_its_killed_worker_costs_none(job: Job) -> None:
    run = job.start()
    wait_until(lambda: len(job.steps) >= KILL_AFTER or run.poll() is not None, RUN_DEADLINE_S, lambda: job.output)
    assert run.poll() is None, job.output
    killed = judge_process(job)
    assert killed in marked(job.marks[0])
    os.kill(killed, signal.SIGKILL)
    job.finish(run)
    found = read_run_folder(job.run_folder)
    assert (found.summary.status, found.summary.version) == ("done", NUM_STEPS)
    judged = [step.components["judge"] for step in found.steps]
    assert len(judged) == NUM_STEPS and all(1 < value < 5 for value in judged), judged
    for step in found.steps:
        expected = step.components["odd"] + WEIGHT * step.components["judge"]
        assert step.values["reward_mean"] == pytest.approx(expected, abs=1e-6)
    failures = found.steps[-1].counters["reward_failures"]
    assert {kind: number for kind, number in failures.items() if number} == {"worker_died": 1}
    assert [fault.worker for fault in read_faults(job.run_folder / FAULTS_FILE)] == ["reward.judge/0"]
    assert judge_process(job) != killed
    none_left(job.marks[0])


def test_a_judge_that_cannot_be_loaded_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    with job_with(tmp_path, tmp_path / "nothing") as job:
        assert job.start().wait(RUN_DEADLINE_S) != 0
        assert "a reward.judge worker cannot be started" in job.output, job.output
        assert "rewards.components[judge]: options.model=" in job.output and "cannot be loaded" in job.output
        none_left(job.marks[0])
