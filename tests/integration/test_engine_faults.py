"""Real engines that are killed or raise at any moment, and runs that go on without them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from engine_cores import MESSAGE, POISON
from jobs import PROMPTS_PER_STEP, Job, in_order, none_left, trained_places
from runs import audited
from sabotage import Saboteur
from test_faults import KINDS, MOMENTS

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.records.actions import LatentActions
from mobula.cluster.replay.trajectory_log import TrajectoryLog

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

DEADLINE_S = 1500.0  # six engines start again, one after the other

SCRIPT = Path(__file__).with_name("struck_job.py")

# A healthy engine reports a broken transfer group after weight_sync.timeout_s and is lost after 1.25 times that: the
# difference must be more than a loaded machine delays a reply.
WORDS = (
    "experiment=digits", "resources=laptop", "algorithm.max_staleness=0",
    "rewards.components.0.function=struck_roles:score", "replay.trajectory_log=true", "checkpoints.interval_steps=1",
    "timeouts.rollout_s=24", "weight_sync.timeout_s=16", "supervision.probe_timeout_s=24",
    "supervision.max_restarts=100",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=["kill", "hang", "slow"])
def test_whatever_happens_to_an_engines_core_costs_nothing_but_time(kind: signal.Signals, tmp_path: Path) -> None:
    job = Job(tmp_path, (*WORDS, f"data.path={tmp_path / 'digits'}"))
    faults = ",".join(f"{moment}-core-{kind.name}" for moment in MOMENTS)
    with job:
        job.finish(job.start(str(SCRIPT), str(tmp_path), faults), DEADLINE_S)
        none_left(job.marks[0])
    assert Saboteur(tmp_path).struck == [f"{moment} core {int(kind)}" for moment in MOMENTS]
    found = read_run_folder(job.run_folder).summary
    assert found.status == "done"
    assert found.restarts == (0 if kind is signal.SIGCONT else len(MOMENTS))
    audit = audited(job.run_folder)
    assert audit.findings == []
    assert len(audit.history.parts[0].losses) == found.restarts
    log = TrajectoryLog(job.run_folder / "trajectories", timeout_s=1.0)
    assert log.steps() == list(range(1, found.num_steps + 1))
    assert trained_places(job.run_folder) == in_order(found.num_steps)


REPLACED_SCRIPT = Path(__file__).with_name("replaced_job.py")

PROMPT = "0/5/"  # the sixth of the first epoch

NUM_STEPS = 4

POISONED_WORDS = (
    "experiment=digits", "resources=laptop", "algorithm.max_staleness=1", "replay.trajectory_log=true",
    f"num_steps={NUM_STEPS}",
)  # fmt: skip


def test_a_prompt_that_ends_one_engine_after_the_other_is_excluded_and_the_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POISON, PROMPT)
    with Job(tmp_path, (*POISONED_WORDS, f"data.path={tmp_path / 'digits'}")) as job:
        job.finish(job.start(str(REPLACED_SCRIPT), "RolloutActor=engine_cores:Poisoned"))
        none_left(job.marks[0])

    found = read_run_folder(job.run_folder)
    assert found.summary.status == "done" and found.summary.num_steps == NUM_STEPS
    assert 3 <= len(found.faults) <= 5 and found.summary.restarts == len(found.faults)
    assert all(fault.cause.startswith(f"RuntimeError: {MESSAGE} at ") for fault in found.faults)

    [skipped] = [row for row in found.skipped if row.reason == "killed_engines"]
    assert f"prompt {PROMPT}{skipped.sample_id} " in skipped.message and MESSAGE in skipped.message
    log = TrajectoryLog(job.run_folder / "trajectories", timeout_s=1.0)
    trained = [group.group.group_id for step in log.steps() for group in log.read(step)]
    assert not any(group_id.startswith(PROMPT) for group_id in trained)
    assert len(set(trained)) == len(trained) == NUM_STEPS * 4

    lines = [line for line in job.output.splitlines() if "is lost" in line or "is excluded" in line]
    assert len(lines) == len(found.faults) + 1, "one line an event"
    assert all(MESSAGE in line for line in lines)
    assert "See stack trace" not in job.output and "Traceback" not in job.output
    run_log = (job.run_folder / "run.log").read_text()
    assert run_log.count("Traceback (most recent call last)") == len(found.faults)
    logs = "".join(path.read_text() for path in (job.run_folder / "logs").glob("rollout-*.log"))
    assert logs.count(f"RuntimeError: {MESSAGE}") >= len(found.faults), "an engine's cause is in its log"
    assert "killed_engines" in (job.run_folder / "report.html").read_text()
    saved = sorted((job.run_folder / "checkpoints").glob("step-*"))[-1]
    states = [json.loads(path.read_text()) for path in saved.rglob("*.json")]
    assert not any(PROMPT in json.dumps(state) for state in states), "no checkpoint brings it back"


NUM_FLOW_STEPS = 14

FLOW_WORDS = (
    "resources=laptop", "algorithm.max_staleness=1", "algorithm.num_minibatches=1", "sampler.flow.num_steps=6",
    "warm_start.num_steps=20", "warm_start.check_interval=20", "evaluation.num_prompts=4", "evaluation.num_samples=2",
    "checkpoints.interval_steps=2", "learner.ema_decay=0.9", "learner.adam_eps=1e-10", "replay.trajectory_log=true",
    "supervision.max_restarts=20", f"num_steps={NUM_FLOW_STEPS}",
)  # fmt: skip

ALGORITHMS = {
    "glyphs_nft": ("sampler.flow.window_start=5", "sampler.flow.window_end=6"),
    "glyphs_grpo": ("sampler.flow.window_end=5", "sampler.flow.window_size=2"),
}


@pytest.mark.parametrize("experiment", ALGORITHMS)
def test_killed_processes_cost_nothing_but_time(experiment: str, tmp_path: Path) -> None:
    own = (f"data.path={tmp_path / 'data'}", f"policy.model={tmp_path / 'model'}", "resume=auto")
    small = (f"algorithm.prompts_per_step={PROMPTS_PER_STEP}", "algorithm.samples_per_prompt=4")
    with Job(tmp_path, (f"experiment={experiment}", *FLOW_WORDS, *ALGORITHMS[experiment], *own), small=small) as job:
        process = job.start()
        for step, role in ((3, "RolloutActor"), (6, "Learner")):
            job.reach(process, step)
            job.kill_worker(role)
        job.reach(process, 9)
        process.kill()
        process.wait()
        assert len(job.steps) < NUM_FLOW_STEPS, "the run was over before its driver could be killed"
        found = job.trained(NUM_FLOW_STEPS)
    assert {fault.worker.partition("/")[0] for fault in found.faults} >= {"rollout", "the learner"}
    log = TrajectoryLog(job.run_folder / "trajectories", timeout_s=5.0)
    trained = [group.group.group_id for step in log.steps() for group in log.read(step)]
    assert log.steps() == list(range(1, NUM_FLOW_STEPS + 1))
    assert len(trained) == len(set(trained)) == NUM_FLOW_STEPS * PROMPTS_PER_STEP
    places = sorted((int(epoch), int(place)) for epoch, place, _ in (name.split("/", maxsplit=2) for name in trained))
    assert [place for epoch, place in places if epoch == 0] == list(range(sum(epoch == 0 for epoch, _ in places)))
    drawn = [t.actions for group in log.read(NUM_FLOW_STEPS) for t in group.group.trajectories]
    assert all(isinstance(actions, LatentActions) and np.isfinite(actions.latents).all() for actions in drawn)
    assert all(np.ptp(actions.latents) > 0 for actions in drawn)
