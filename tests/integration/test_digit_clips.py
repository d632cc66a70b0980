"""The main job on videos, prepared by a processor worker: a warm start, a few steps of RL, evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job, none_left

from mobula.cluster.metrics.report.run_folder import PLAN_FILE, read_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.exhaustive, pytest.mark.timeout(900)]

NUM_STEPS = 3
SMALL = (
    "warm_start.num_steps=10", "warm_start.batch_size=16", "warm_start.check_interval=10",
    "warm_start.max_checks_rows=8", "evaluation.num_prompts=16", "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=8", "algorithm.max_concurrent_groups=8", "resources.object_store_bytes=268435456",
    "resources.processor.num_workers=1", "resources.processor.num_cpus=0.1", "metrics.progress=false",
    "timeouts.start_s=500",
)  # fmt: skip


def test_clips_are_sampled_and_trained_on(tmp_path: Path) -> None:
    words = ("experiment=digit_clips", "resources=laptop", f"data.path={tmp_path / 'clips'}", f"num_steps={NUM_STEPS}")
    with Job(tmp_path, words, small=SMALL) as job:
        job.finish(job.start())
    found = read_run_folder(job.run_folder)
    assert (found.summary.status, found.summary.version, found.faults) == ("done", NUM_STEPS, [])
    assert found.summary.logprob_gap_mean <= 1e-5 and 0 < found.summary.logprob_gap_max <= 1e-3
    assert found.summary.media_bytes_unique > 0 and not found.skipped
    assert "processor" in {row["role"] for row in json.loads((job.run_folder / PLAN_FILE).read_text())}
    none_left(job.marks[0])
