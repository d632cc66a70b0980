"""`mobula train` on tiny video models: one step of GRPO each, whose videos are written as MP4."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from flow_run import WORDS, write_texts
from jobs import Job

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.metrics.report.samples import read_artifacts

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.exhaustive, pytest.mark.timeout(900)]
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
    with Job(
        tmp_path, (*words, *own), small=("metrics.progress=false", "resources.object_store_bytes=268435456")
    ) as job:
        job.finish(job.start())
    found = read_run_folder(job.run_folder)
    assert (found.summary.status, found.summary.version) == ("done", 1)
    assert found.summary.logprob_gap_mean == 0 and not found.skipped
    rows = read_artifacts(job.run_folder / "artifacts")
    assert len(rows) == 3
    for row in rows:
        content = (job.run_folder / "artifacts" / row["file"]).read_bytes()
        assert row["file"].endswith(".mp4") and row["num_frames"] == 5
        assert hashlib.sha256(content).hexdigest() == row["sha256"] and content[4:8] == b"ftyp"
