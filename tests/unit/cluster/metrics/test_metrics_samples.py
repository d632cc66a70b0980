"""Samples and artifacts of a run: which are kept, what is written, and what a resume keeps."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from metrics_data import digit_image, fetch_value, flat_image, make_group, make_keeper, write_run
from PIL import Image

from mobula.cluster.metrics.artifacts import ArtifactWriter
from mobula.cluster.metrics.report.samples import INDEX, NUM_LOOKS, read_artifacts, read_samples
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaHandle, MediaSpan, ProcessedMedia
from mobula.cluster.records.trajectory import EpisodeTurn, ScoredGroup
from mobula.deploy.pages.report import write_report


def mixed(step: int) -> list:
    """Two prompts of this step, each with a right and a wrong answer and the same image."""
    return [make_group(f"s{step}-{i}", [1.0, 0.0], images=[digit_image("3")]) for i in range(2)]


def test_what_is_kept_is_bounded_and_has_best_worst_and_random_of_both_halves(tmp_path: Path) -> None:
    samples = make_keeper(tmp_path / "samples.jsonl")
    for step in range(1, 21):
        samples.offer(step, mixed(step))
    counts = Counter((s.period, s.kind) for s in samples.samples)
    assert counts == {(p, k): 2 for p in ("early", "late") for k in ("best", "worst", "random")}
    assert {s.reward for s in samples.samples if s.kind == "best"} == {1.0}
    assert {s.reward for s in samples.samples if s.kind == "worst"} == {0.0}
    assert {s.step for s in samples.samples if (s.period, s.kind) == ("early", "best")} == {1, 2}
    assert {s.step for s in samples.samples if (s.period, s.kind) == ("late", "worst")} == {19, 20}


def test_a_higher_reward_beats_an_earlier_step(tmp_path: Path) -> None:
    samples = make_keeper(tmp_path / "samples.jsonl", limit=6)
    for step, best in [(1, 0.4), (2, 0.9), (3, 0.6)]:
        samples.offer(step, [make_group(f"s{step}", [best, 0.0])])
    (kept,) = [s for s in samples.samples if s.kind == "best"]
    assert (kept.step, kept.reward) == (2, 0.9)


def test_equal_rewards_are_neither_good_nor_bad(tmp_path: Path) -> None:
    samples = make_keeper(tmp_path / "samples.jsonl")
    samples.offer(1, [make_group("a", [0.1, 0.1, 0.1])])
    assert [s.kind for s in samples.samples] == ["random"]


def test_a_bucket_does_not_show_one_prompt_twice(tmp_path: Path) -> None:
    samples = make_keeper(tmp_path / "samples.jsonl", limit=24)
    for step in range(1, 11):
        samples.offer(step, [make_group("same", [1.0, 0.0])])
    assert Counter(s.kind for s in samples.samples) == {"best": 1, "worst": 1, "random": 1}


def test_samples_carry_answer_reward_reasons_and_images_through_the_file(tmp_path: Path) -> None:
    image = digit_image("7")
    samples = make_keeper(tmp_path / "samples.jsonl")
    samples.offer(1, [make_group("a", [1.0, 0.0], text="seven", images=[image])])
    assert len(samples.samples) == 3
    assert (tmp_path / "samples.jsonl").read_text().count('"thumbnail"') == 1, "several samples share the image"
    found = read_samples(tmp_path / "samples.jsonl")
    best = next(s for s in found.samples if s.kind == "best")
    assert (best.response, best.references, best.reward) == ("seven", ("3",), 1.0)
    assert best.components == {"answer": 1.0, "format": 1.0} and best.reasons == {"answer": "equal"}
    assert [found.thumbnails[key] for key in best.media_keys] == [image]


def test_a_resumed_run_keeps_its_samples_and_forgets_those_of_lost_steps(tmp_path: Path) -> None:
    first = make_keeper(tmp_path / "samples.jsonl")
    for step in range(1, 15):
        first.offer(step, mixed(step))
    second = make_keeper(tmp_path / "samples.jsonl", version=12)
    assert list(second.samples) == [s for s in first.samples if s.step <= 12]
    second.offer(13, mixed(13))
    assert 14 not in {s.step for s in read_samples(tmp_path / "samples.jsonl").samples}


def test_a_long_run_looks_at_few_steps_and_fetches_little(tmp_path: Path) -> None:
    num_fetches = 0

    def counting(references: Sequence[object], *, timeout_s: float, what: str) -> list[object]:
        nonlocal num_fetches
        num_fetches += 1
        return list(references)

    samples = make_keeper(tmp_path / "samples.jsonl", num_steps=2000, fetch=counting)
    for step in range(1, 2001):
        samples.offer(step, [make_group(f"s{step}", [1.0, 0.0])])
    assert num_fetches <= 3 * (NUM_LOOKS + 2)
    assert any(s.step == 2000 for s in samples.samples)


def test_a_very_long_answer_is_cut_and_marked_with_how_much_is_missing(tmp_path: Path) -> None:
    samples = make_keeper(tmp_path / "samples.jsonl")
    samples.offer(1, [make_group("a", [1.0, 0.0], text="x" * 9000)])
    assert samples.samples[0].response.endswith("[…5000 more]")


def episode(image: bytes) -> ScoredGroup:
    """Two turns of two tokens with an image of one token between them, of one sibling."""
    scored = make_group("e", [1.0, 0.0], spans=((0, 5),))
    handle = MediaHandle("later", "image", len(image), ProcessedMedia("image", {}, image))
    turns = (
        EpisodeTurn(0, 2, "left", "user: <image> & go on", {"step": -0.5}, "none"),
        EpisodeTurn(3, 5, "<b>right</b>", "", {"goal": 2.0, "step": -0.5}, "unknown_tool"),
    )
    first, second = scored.group.trajectories
    actions = TokenActions(first.actions.token_ids, media=(handle,), media_spans=(MediaSpan(2, 3),))
    played = replace(first, actions=actions, response=replace(first.response, turns=turns))
    return replace(scored, group=replace(scored.group, trajectories=(played, second)))


def test_an_episode_is_shown_turn_by_turn_with_the_images_of_its_answers(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=1)
    (tmp_path / "samples.jsonl").unlink()
    make_keeper(tmp_path / "samples.jsonl", num_steps=1).offer(1, [episode(digit_image("7"))])
    found = read_samples(tmp_path / "samples.jsonl")
    best = next(s for s in found.samples if s.kind == "best")
    assert [(t.action, t.observation, t.media_keys) for t in best.turns] == [
        ("left", "user: <image> & go on", ("later",)),
        ("<b>right</b>", "", ()),
    ]
    assert best.turns[1].rewards == {"goal": 2.0, "step": -0.5}
    assert found.thumbnails == {"later": digit_image("7")}
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "user: &lt;image&gt; &amp; go on" in page and "&lt;b&gt;right&lt;/b&gt;" in page
    assert "tool call unknown tool" in page and 'alt="Image 1 of turn 1 of sample e"' in page
    assert f"data:image/png;base64,{base64.b64encode(digit_image('7')).decode()}" in page


def drawn(name: str, rewards: list[float], num_frames: int = 1) -> ScoredGroup:
    """A group whose sibling n answers with frames of the level 40 n and more."""
    group = make_group(name, rewards)
    trajectories = []
    for n, t in enumerate(group.group.trajectories):
        frames = tuple(flat_image(40 * n + 20 * f, (48, 32)) for f in range(num_frames))
        trajectories.append(replace(t, response=replace(t.response, images=frames)))
    return replace(group, group=replace(group.group, trajectories=tuple(trajectories)))


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
    assert (tmp_path / rows[2]["file"]).read_bytes() == flat_image(40, (48, 32))


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


def test_drawn_groups_keep_the_ends_of_all_siblings_through_the_file_and_a_resume(tmp_path: Path) -> None:
    samples = make_keeper(tmp_path / "samples.jsonl")
    long = "a b c d " * 40
    for step in range(1, 4):
        samples.offer(step, [make_group(f"s{step}", [1.0, 0.0, 0.0], text=long)])
    found = read_samples(tmp_path / "samples.jsonl").answers
    assert [(g.step, g.sample_id, len(g.answers)) for g in found] == [(n, f"s{n}", 3) for n in (1, 2, 3)]
    answer = found[0].answers[0]
    assert long.endswith(answer.text) and len(answer.text) == 160 and answer.repetition > 0.9
    assert (answer.reward, answer.reasons, answer.finish_reason) == (1.0, {"answer": "equal"}, "stop")
    second = make_keeper(tmp_path / "samples.jsonl", version=2)
    second.offer(3, mixed(3))
    assert [group.step for group in read_samples(tmp_path / "samples.jsonl").answers] == [1, 2, 3, 3]
