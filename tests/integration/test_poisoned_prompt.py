"""The main job with a prompt that ends every engine that gets it: the run excludes it, names it and ends well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job, none_left
from poisoned import MESSAGE

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.replay.trajectory_log import TrajectoryLog

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("poisoned_job.py")
POISON = "0/5/"
NUM_STEPS = 4
WORDS = (
    "experiment=digits",
    "resources=laptop",
    "algorithm.max_staleness=1",
    "replay.trajectory_log=true",
    f"num_steps={NUM_STEPS}",
)


def test_a_prompt_that_ends_one_engine_after_the_other_is_excluded_and_the_run_ends_well(tmp_path: Path) -> None:
    with Job(tmp_path, (*WORDS, f"data.path={tmp_path / 'digits'}")) as job:
        job.finish(job.start(str(SCRIPT), POISON))
        none_left(job.marks[0])

    found = read_run_folder(job.run_folder)
    assert found.summary.status == "done" and found.summary.num_steps == NUM_STEPS
    assert 3 <= len(found.faults) <= 5 and found.summary.restarts == len(found.faults)
    assert all(fault.cause.startswith(f"RuntimeError: {MESSAGE} at ") for fault in found.faults)

    [skipped] = [row for row in found.skipped if row.reason == "killed_engines"]
    assert f"prompt {POISON}{skipped.sample_id} " in skipped.message and MESSAGE in skipped.message
    log = TrajectoryLog(job.run_folder / "trajectories", timeout_s=1.0)
    trained = [group.group.group_id for step in log.steps() for group in log.read(step)]
    assert not any(group_id.startswith(POISON) for group_id in trained)
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
    assert not any(POISON in json.dumps(state) for state in states), "no checkpoint brings it back"
