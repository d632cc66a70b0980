"""Artifacts of a run: which images are written, as what, with which hash, and what a resume keeps."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from metrics_data import fetch_value, make_group
from PIL import Image

from mobula.cluster.metrics.artifacts import ArtifactWriter, Offered
from mobula.cluster.metrics.report.videos import INDEX, read_artifacts
from mobula.cluster.metrics.step_records import SampleRecord
from mobula.cluster.records.trajectory import ScoredGroup


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((32, 48, 3), level, dtype=np.uint8)).save(file, format="PNG")
    return file.getvalue()


def drawn(name: str, rewards: list[float], num_frames: int = 1) -> ScoredGroup:
    """A group whose sibling n answers with frames of the level 40 n and more."""
    group = make_group(name, rewards)
    trajectories = tuple(
        replace(t, response=replace(t.response, images=tuple(png(40 * n + 20 * f) for f in range(num_frames))))
        for n, t in enumerate(group.group.trajectories)
    )
    return replace(group, group=replace(group.group, trajectories=trajectories))


def writer(folder: Path, per_step: int = 3, version: int = 0) -> ArtifactWriter:
    return ArtifactWriter(folder, per_step=per_step, frame_rate=8, version=version, fetch=fetch_value, timeout_s=1.0)


def test_one_of_each_group_comes_before_a_second_of_any(tmp_path: Path) -> None:
    writer(tmp_path).offer(1, [drawn("a/1", [0.5, 1.0]), drawn("b", [0.25, 0.0])])
    rows = read_artifacts(tmp_path)
    assert [row["file"] for row in rows] == [f"step-000001/{name}.png" for name in ("a_1-0", "b-0", "a_1-1")]
    assert [row["reward"] for row in rows] == [0.5, 0.25, 1.0]
    for row in rows:
        content = (tmp_path / row["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row["sha256"] and row["num_frames"] == 1
    assert (tmp_path / rows[2]["file"]).read_bytes() == png(40)


def test_several_frames_are_a_video_that_shows_them(tmp_path: Path) -> None:
    writer(tmp_path, per_step=1).offer(1, [drawn("a", [1.0], num_frames=5)])
    [row] = read_artifacts(tmp_path)
    assert row["file"] == "step-000001/a-0.mp4" and row["num_frames"] == 5
    with Image.open(tmp_path / row["poster"]) as poster:
        assert poster.size == (48, 32) and np.asarray(poster).max() <= 6, "the first frame"
    with av.open(str(tmp_path / row["file"])) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == 8
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * 5
    assert [float(frame.mean()) for frame in frames] == pytest.approx([0, 20, 40, 60, 80], abs=6)


def test_a_resume_takes_later_rows_out(tmp_path: Path) -> None:
    first = writer(tmp_path, per_step=1)
    for step in (1, 2, 3):
        first.offer(step, [drawn("a", [float(step)])])
    again = writer(tmp_path, per_step=1, version=2)
    again.offer(3, [drawn("b", [7.0])])
    assert [(row["step"], row["reward"]) for row in read_artifacts(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 7.0)]
    assert all(json.loads(line)["prompt"] for line in (tmp_path / INDEX).read_text().splitlines())


def test_responses_of_text_leave_no_artifact(tmp_path: Path) -> None:
    writer(tmp_path).offer(1, [make_group("a", [1.0])])
    assert read_artifacts(tmp_path) == []


def test_a_writer_of_artifacts_keeps_the_samples_of_others(tmp_path: Path) -> None:
    class Kept:
        def offer(self, step: int, groups: Sequence[ScoredGroup]) -> Sequence[SampleRecord]:
            return [sample]

    sample = SampleRecord(1, "best", "question", "response", ("answer",), 1.0, ())
    assert Offered([Kept(), writer(tmp_path)]).offer(1, [drawn("a", [1.0])]) == [sample]
