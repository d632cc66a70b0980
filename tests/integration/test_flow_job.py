"""`mobula train` on a flow model: images are sampled, scored by a function of the user, trained on and pushed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from flow_run import REDNESS, WORDS, write_texts
from jobs import Job

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 2


def finished(tmp_path: Path, preset: str, also: Callable[[Job], None] | None = None) -> RunFolder:
    """Of a short run on the resources of `preset`, which keeps an average of its weights."""
    reward, texts = tmp_path / "redness.py", write_texts(tmp_path / "texts")
    reward.write_text(REDNESS, encoding="utf-8")
    own = (f"data.path={texts}", f"policy.model={tmp_path / 'model'}", f"num_steps={NUM_STEPS}")
    own += (f"resources={preset}", "resources.learner.num_workers=1", "resources.reference.num_workers=0")
    own += ("evaluation.num_prompts=4", "learner.ema_decay=0.5")
    own += (f"rewards.components.0.function={reward}:score", "replay.trajectory_log=true")
    words = tuple(word for word in WORDS if not word.startswith("resources."))
    with Job(
        tmp_path, (*words, *own), small=("metrics.progress=false", "resources.object_store_bytes=268435456")
    ) as job:
        job.finish(job.start())
        if also is not None:
            also(job)
    found = read_run_folder(job.run_folder)
    assert (found.summary.status, found.summary.version) == ("done", NUM_STEPS)
    assert found.summary.logprob_gap_mean == 0
    assert not found.skipped
    pipeline = DiffusionPipeline.from_pretrained(job.run_folder / "policy")
    assert type(pipeline).__name__ == "StableDiffusion3Pipeline"
    return found


@pytest.mark.core
def test_a_flow_model_is_trained_and_its_pipeline_written(tmp_path: Path) -> None:
    finished(tmp_path, "laptop_overlapped")


@pytest.mark.matrix
def test_a_flow_model_is_trained_on_the_device_that_its_samplers_sleep_on(tmp_path: Path) -> None:
    """Samplers and learner take turns, so a step waits for its whole batch and follows the last push."""
    found = finished(tmp_path, "laptop_colocated", also=evaluate_exports)
    assert found.summary.restarts == 0 and found.summary.weight_syncs == NUM_STEPS + 1
    assert all(step.staleness.keys() == {0} for step in found.steps)
    live, average = (evaluated(tmp_path / name) for name in ("live", "average"))
    assert live == found.evaluations[-1].accuracy != average


def evaluate_exports(job: Job) -> None:
    """Score the weights of the last step, and their average, with the words of the run."""
    words = [word for word in (*job.overrides, *job.small) if not word.startswith("policy.model=")]
    for name, flags in (("live", ()), ("average", ("--ema",))):
        pipeline, scores = job.folder / f"{name}-pipeline", job.folder / name
        job.finish(job.start_command("export", str(job.run_folder), "--output", str(pipeline), *flags))
        job.finish(job.start_command("evaluate", *words, f"policy.model={pipeline}", "--output", str(scores)))


def evaluated(folder: Path) -> float:
    [found] = json.loads((folder / "evaluation.json").read_text())
    return found["accuracy"]
