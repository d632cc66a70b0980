"""A flow run in which a sampler, a learner rank and at last the driver are killed trains every prompt once."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from jobs import PROMPTS_PER_STEP, RUN_DEADLINE_S, Job, marked
from waiting import wait_until

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.records.actions import LatentActions
from mobula.cluster.replay.trajectory_log import TrajectoryLog

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

NUM_STEPS = 14
WORDS = (
    "resources=laptop", "algorithm.max_staleness=1", "algorithm.num_minibatches=1", "sampler.flow.num_steps=6",
    "warm_start.num_steps=20", "warm_start.check_interval=20", "evaluation.num_prompts=4", "evaluation.num_samples=2",
    "checkpoints.interval_steps=2", "learner.ema_decay=0.9", "learner.adam_eps=1e-10", "replay.trajectory_log=true",
    "supervision.max_restarts=20", f"num_steps={NUM_STEPS}",
)  # fmt: skip
ALGORITHMS = {
    "glyphs_nft": ("sampler.flow.window_start=5", "sampler.flow.window_end=6"),
    "glyphs_grpo": ("sampler.flow.window_end=5", "sampler.flow.window_size=2"),
}


@pytest.mark.parametrize("experiment", ALGORITHMS)
def test_killed_processes_cost_nothing_but_time(experiment: str, tmp_path: Path) -> None:
    own = (f"data.path={tmp_path / 'data'}", f"policy.model={tmp_path / 'model'}", "resume=auto")
    small = (
        f"algorithm.prompts_per_step={PROMPTS_PER_STEP}",
        "algorithm.samples_per_prompt=4",
        "metrics.progress=false",
    )
    with Job(tmp_path, (f"experiment={experiment}", *WORDS, *ALGORITHMS[experiment], *own), small=small) as job:
        process = job.start()
        for step, role in ((3, "RolloutActor"), (6, "Learner")):
            reach(job, process, step)
            os.kill(process_of(job, role), signal.SIGKILL)
        reach(job, process, 9)
        process.kill()
        process.wait()
        assert len(job.steps) < NUM_STEPS, "the run was over before its driver could be killed"
        job.finish(job.start())
    found = read_run_folder(job.run_folder)
    assert found.summary is not None and (found.summary.status, found.summary.version) == ("done", NUM_STEPS)
    assert {fault.worker.partition("/")[0] for fault in found.faults} >= {"rollout", "the learner"}
    log = TrajectoryLog(job.run_folder / "trajectories", timeout_s=5.0)
    trained = [group.group.group_id for step in log.steps() for group in log.read(step)]
    assert log.steps() == list(range(1, NUM_STEPS + 1))
    assert len(trained) == len(set(trained)) == NUM_STEPS * PROMPTS_PER_STEP
    places = sorted((int(epoch), int(place)) for epoch, place, _ in (name.split("/", maxsplit=2) for name in trained))
    assert [place for epoch, place in places if epoch == 0] == list(range(sum(epoch == 0 for epoch, _ in places)))
    drawn = [t.actions for group in log.read(NUM_STEPS) for t in group.group.trajectories]
    assert all(isinstance(actions, LatentActions) and np.isfinite(actions.latents).all() for actions in drawn)
    assert all(np.ptp(actions.latents) > 0 for actions in drawn)


def reach(job: Job, process: subprocess.Popen[str], step: int) -> None:
    wait_until(lambda: len(job.steps) >= step or process.poll() is not None, RUN_DEADLINE_S, lambda: job.output)
    assert process.poll() is None, job.output


def process_of(job: Job, role: str) -> int:
    """The process id of one of the run's workers."""
    found = [pid for pid, command in marked(job.marks[-1]).items() if command.startswith(f"ray::{role}")]
    assert found, marked(job.marks[-1])
    return min(found)
