"""`mobula train experiment=tones` with real engines, in short: sounds through the whole loop, a bad one skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Job

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.examples.tones.tones import write_tones

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """One vLLM engine and two FSDP2 ranks; few sounds, of which one is corrupt, and a short warm start."""
    folder = tmp_path_factory.mktemp("tones")
    data: Path = write_tones(folder / "data", num_train=40, num_validation=8, num_test=8)
    (data / "sounds" / "train_0003.wav").write_bytes(b"no sound")
    words = ("experiment=tones", "resources=laptop", "num_steps=3", "algorithm.drop_uniform_groups=false")
    short = ("data=jsonl", f"data.path={data}", "resources.rollout.num_workers=1")
    with Job(folder, (*words, *short)) as job:
        job.finish(job.start())
        yield read_run_folder(job.run_folder)


def test_the_run_ends_and_engine_and_learner_agree_on_every_sampled_token(report: RunFolder) -> None:
    assert (report.summary.status, report.summary.version) == ("done", 3)
    assert report.summary.logprob_gap_max <= 1e-3
    assert report.summary.media_bytes_unique > 0


def test_the_corrupt_sound_is_skipped_counted_and_named(report: RunFolder) -> None:
    [skipped] = report.skipped
    assert "tone-train-0003" in skipped.sample_id
    assert "train_0003.wav is corrupt or no sound" in skipped.message
