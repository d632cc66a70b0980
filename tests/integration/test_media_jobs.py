"""`mobula train` on videos and sounds, and on models that make videos and images: a few steps of whole runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from flow_run import REDNESS, WORDS, write_texts
from jobs import BARE, Job, none_left

from mobula.cluster.metrics.report.run_folder import PLAN_FILE, RunFolder
from mobula.cluster.metrics.report.samples import read_artifacts
from mobula.examples.tones.tones import write_tones

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 3

SMALL = (
    "warm_start.num_steps=10", "warm_start.batch_size=16", "warm_start.check_interval=10",
    "warm_start.max_checks_rows=8", "evaluation.num_prompts=16", "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=8", "algorithm.max_concurrent_groups=8", *BARE,
    "resources.processor.num_workers=1", "resources.processor.num_cpus=0.1",
)  # fmt: skip


@pytest.mark.families
@pytest.mark.exhaustive
def test_clips_are_sampled_and_trained_on(tmp_path: Path) -> None:
    words = ("experiment=digit_clips", "resources=laptop", f"data.path={tmp_path / 'clips'}", f"num_steps={NUM_STEPS}")
    with Job(tmp_path, words, small=SMALL) as job:
        found = job.trained(NUM_STEPS)
    assert found.faults == []
    assert found.summary.logprob_gap_mean <= 1e-5 and 0 < found.summary.logprob_gap_max <= 1e-3
    assert found.summary.media_bytes_unique > 0 and not found.skipped
    assert "processor" in {row["role"] for row in json.loads((job.run_folder / PLAN_FILE).read_text())}
    none_left(job.marks[0])


@pytest.mark.families
@pytest.mark.exhaustive
def test_sounds_are_trained_on_and_the_corrupt_one_is_skipped_counted_and_named(tmp_path: Path) -> None:
    """One vLLM engine and two FSDP2 ranks; few sounds, and a short warm start."""
    data: Path = write_tones(tmp_path / "data", num_train=40, num_validation=8, num_test=8)
    (data / "sounds" / "train_0003.wav").write_bytes(b"no sound")
    words = ("experiment=tones", "resources=laptop", "num_steps=3", "algorithm.drop_uniform_groups=false")
    short = ("data=jsonl", f"data.path={data}", "resources.rollout.num_workers=1")
    with Job(tmp_path, (*words, *short)) as job:
        report = job.trained(3)
    assert report.summary.logprob_gap_max <= 1e-3
    assert report.summary.media_bytes_unique > 0
    [skipped] = report.skipped
    assert "tone-train-0003" in skipped.sample_id
    assert "train_0003.wav is corrupt or no sound" in skipped.message


REWARD = '''
"""How much redder than green a video is on average over its frames."""

import io

import numpy as np
from PIL import Image


def score(request, **options):
    frames = [np.asarray(Image.open(io.BytesIO(f))).astype(float) / 255 for f in request.response.images]
    assert len(frames) == 5, "a video has five frames here"
    return float(np.mean([f[..., 0].mean() - f[..., 1].mean() for f in frames]))
'''


@pytest.mark.families
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["wan", "cosmos2_5"])
def test_a_video_model_is_trained_and_its_videos_are_written(tmp_path: Path, name: str) -> None:
    reward, texts = tmp_path / "redness.py", write_texts(tmp_path / "texts")
    reward.write_text(REWARD, encoding="utf-8")
    own = (f"policy=tiny_{name}", f"policy.model={tmp_path / 'model'}", f"data.path={texts}", "num_steps=1")
    own += ("resources=laptop_overlapped", "resources.reference.num_workers=0", "evaluation.num_prompts=2")
    own += ("sampler.flow.num_frames=5", "sampler.flow.max_text_tokens=128", "metrics.artifacts_per_step=3")
    own += (f"rewards.components.0.function={reward}:score",)
    changed = ("resources.", "policy=", "sampler.flow.max_text_tokens")
    words = tuple(word for word in WORDS if not word.startswith(changed))
    with Job(tmp_path, (*words, *own), small=BARE) as job:
        found = job.trained(1)
    assert found.summary.logprob_gap_mean == 0 and not found.skipped
    rows = read_artifacts(job.run_folder / "artifacts")
    assert len(rows) == 3
    for row in rows:
        content = (job.run_folder / "artifacts" / row["file"]).read_bytes()
        assert row["file"].endswith(".mp4") and row["num_frames"] == 5
        assert hashlib.sha256(content).hexdigest() == row["sha256"] and content[4:8] == b"ftyp"


NUM_FLOW_STEPS = 2


def finished(tmp_path: Path, preset: str, also: Callable[[Job], None] | None = None) -> RunFolder:
    """Of a short run on the resources of `preset`, which keeps an average of its weights."""
    reward, texts = tmp_path / "redness.py", write_texts(tmp_path / "texts")
    reward.write_text(REDNESS, encoding="utf-8")
    own = (f"data.path={texts}", f"policy.model={tmp_path / 'model'}", f"num_steps={NUM_FLOW_STEPS}")
    own += (f"resources={preset}", "resources.learner.num_workers=1", "resources.reference.num_workers=0")
    own += ("evaluation.num_prompts=4", "learner.ema_decay=0.5")
    own += (f"rewards.components.0.function={reward}:score", "replay.trajectory_log=true")
    words = tuple(word for word in WORDS if not word.startswith("resources."))
    with Job(tmp_path, (*words, *own), small=BARE) as job:
        found = job.trained(NUM_FLOW_STEPS)
        if also is not None:
            also(job)
    assert found.summary.logprob_gap_mean == 0 and not found.skipped
    pipeline = DiffusionPipeline.from_pretrained(job.run_folder / "policy")
    assert type(pipeline).__name__ == "StableDiffusion3Pipeline"
    return found


def test_a_flow_model_is_trained_and_its_pipeline_written(tmp_path: Path) -> None:
    finished(tmp_path, "laptop_overlapped")


@pytest.mark.matrix
def test_a_flow_model_is_trained_on_the_device_that_its_samplers_sleep_on(tmp_path: Path) -> None:
    """Samplers and learner take turns, so a step waits for its whole batch and follows the last push."""
    found = finished(tmp_path, "laptop_colocated", also=evaluate_exports)
    assert found.summary.restarts == 0 and found.summary.weight_syncs == NUM_FLOW_STEPS + 1
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
