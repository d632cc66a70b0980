"""The main job with `weight_sync.payload=delta`: an engine and a learner rank are killed, and pushes go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, none_left

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import StepRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS = 8


def test_killed_engines_and_learner_ranks_get_and_send_whole_tensors_and_then_changes_again(
    tmp_path: Path,
) -> None:
    words = (
        "experiment=digits", "resources=laptop", f"data.path={tmp_path / 'digits'}", f"num_steps={NUM_STEPS}",
        "resources.dtype=bfloat16", "weight_sync.payload=delta", "weight_sync.canary_interval=1",
        "learner.learning_rate=1e-6", "checkpoints.interval_steps=1", "algorithm.max_staleness=0",
    )  # fmt: skip
    with Job(tmp_path, words) as job:
        training = job.start()
        for num_steps, role in ((2, "RolloutActor"), (4, "Learner")):
            job.reach(training, num_steps)
            job.kill_worker(role)
        job.finish(training)
        none_left(job.marks[-1])
    found = job.done(NUM_STEPS)
    assert found.summary.restarts >= 2
    # In order of time: a slow checkpoint lets the new learner repeat the first steps.
    records = [r for r in read_records(job.run_folder / "metrics.jsonl") if isinstance(r, StepRecord)]
    shares = [record.values[MetricName.PUSH_CHANGED_SHARE] for record in records]
    # A step records the newest push that has arrived, which may be the one before.
    assert min(shares[:2]) < 0.2, "the second push has changes alone"
    assert shares[-1] < 0.2, "so has the last one"
    assert any(share == 1.0 for share in shares), "the new learner sends whole tensors"
    assert 0 <= found.summary.canary_max <= 0.3
