"""`experiment=own` on real engines: a text-only checkpoint and a data folder of one's own, in a path with spaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job
from tiny_text_models import write_text_policy

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.configs.load import load_resolved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def write_sums(folder: Path) -> Path:
    """Questions without images, in every split."""
    folder.mkdir()
    lines = [
        json.dumps({"question": f"What is the sum of {n} and {n % 7}?", "answer": n + n % 7}) + "\n" for n in range(20)
    ]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def test_a_text_model_of_ones_own_trains_on_the_settings_for_released_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "mein Übungslauf, a=b"
    folder.mkdir()
    write_text_policy(folder / "model", "qwen3")
    words = ("experiment=own", "resources=laptop_overlapped", "learner=single", "num_steps=4")
    with Job(
        folder, (*words, f"data.path={write_sums(folder / 'sums')}", "sampler.max_tokens=40", "warm_start.num_steps=0")
    ) as job:
        job.finish(job.start())
    config, found = load_resolved(job.run_folder / "config.yaml"), read_run_folder(job.run_folder)
    assert (config.learner.learning_rate, config.warm_start.num_steps, config.needs_reference) == (1e-6, 0, False)
    assert (found.summary.status, found.summary.version) == ("done", 4)
    assert found.summary.logprob_gap_mean < 1e-5 and found.summary.logprob_gap_max < 1e-3
    log = (job.run_folder / "run.log").read_text(encoding="utf-8")
    assert "(qwen3, " in log and "nothing frozen" in log
    assert log.index("this run:") < log.index("left for 1 steps")
    assert " before RL, " in job.output
