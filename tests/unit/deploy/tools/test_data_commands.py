"""`mobula data convert` and `mobula data inspect`: what they write is read again, and shows what there is."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from clips import noise_frames, write_clip
from data_rows import read_split
from PIL import Image
from typer.testing import CliRunner, Result

from mobula.actors.datasets.rows import Row
from mobula.actors.processors import media
from mobula.configs.load import load_config
from mobula.deploy.cli import app
from mobula.deploy.data.data_command import histogram

LIMITS = load_config(["experiment=digits"]).data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows with none, one and two images, and two that cannot be used."""
    data = tmp_path / "data"
    (data / "images").mkdir(parents=True)
    for name, colour, suffix in (("a", 0, "png"), ("b", 200, "jpg")):
        Image.new("RGB", (8, 6), (colour, colour, colour)).save(data / "images" / f"{name}.{suffix}")
    rows = [
        {"id": "none", "question": "1 + 1? <b>&amp;</b>", "answer": "2", "label": "sum"},
        {"id": "one", "question": "<image>Which?", "answer": "7", "image": "images/a.png", "label": "digit"},
        {"id": "two", "question": "<image>or<image>?", "answer": "8", "image": ["images/b.jpg", "images/a.png"]},
        {"id": "lost", "question": "<image>Which?", "answer": "7", "image": "images/<lost>.png"},
        {"id": "one", "question": "again?", "answer": "7"},
    ]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return data


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["data", *words])


def test_converted_rows_are_read_again_with_their_images(folder: Path, tmp_path: Path) -> None:
    words = (f"data.path={folder}", "data.max_skipped_fraction=0.5", "--split", "train")
    result = run("convert", str(tmp_path / "out"), "data=jsonl", *words)
    assert result.exit_code == 0, result.output
    assert "rows written" in result.output and "missing_file 1" in result.output
    before, after = read_split(folder), read_split(tmp_path / "out", "train", "messages")
    assert [row.sample_id for row in after.rows] == ["none", "one", "two"]
    for old, new in zip(before.rows, after.rows, strict=True):
        assert (new.question, new.answer, new.solution) == (old.question, old.answer, old.solution)
        assert new.metadata.get("label") == old.metadata.get("label")
        for image, wanted in zip(new.images, old.images, strict=True):
            pixels = [np.asarray(media.decode_image(media.read_image(p, LIMITS), p, LIMITS)) for p in (image, wanted)]
            np.testing.assert_array_equal(*pixels)


def converted(data: Path, out: Path, rows: list[dict[str, Any]], bad: str) -> list[tuple[Row, Row]]:
    """Each row before and after; the row `bad` has the broken file of this name, and is skipped."""
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = (f"data.path={data}", "data=jsonl", "data.max_skipped_fraction=0.5", "--split", "train")
    result = run("convert", str(out), *words)
    assert result.exit_code == 0, result.output
    assert "skipped: bad_media 1" in result.output and bad in result.output
    before = [row for row in read_split(data).rows if row.sample_id != "bad"]
    after = read_split(out, "train", "messages").rows
    assert [row.sample_id for row in after] == [row["id"] for row in rows if row["id"] != "bad"]
    assert [row.question for row in after] == [row.question for row in before]
    return list(zip(before, after, strict=True))


def test_converted_rows_have_the_frames_of_their_videos(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "frames").mkdir(parents=True)
    frames = noise_frames(4, (24, 16))
    for number, frame in enumerate(frames):
        frame.save(data / "frames" / f"{number}.png")
    write_clip(data / "clip.mkv", frames, rate=4)
    (data / "cut.mp4").write_bytes(b"no video")
    rows = [
        {"id": "file", "question": "<video>Which?", "answer": "7", "video": "clip.mkv"},
        {"id": "folder", "question": "<video>and <video>?", "answer": "8", "videos": ["frames", "clip.mkv"]},
        {"id": "bad", "question": "<video>Which?", "answer": "7", "video": "cut.mp4"},
        {"id": "text", "question": "1 + 1?", "answer": "2"},
    ]
    for old, new in converted(data, tmp_path / "out", rows, bad="cut.mp4"):
        for video, wanted in zip(new.videos, old.videos, strict=True):
            found, expected = (media.load_video(each, LIMITS) for each in (video, wanted))
            assert found.measure == expected.measure
            np.testing.assert_array_equal(*(media.decode_video(each, LIMITS) for each in (found, expected)))


def test_converted_rows_have_the_samples_of_their_sounds(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    samples = np.random.default_rng(0).normal(0, 0.1, (500, 2)).astype(np.float32)
    soundfile.write(data / "a.flac", samples, 22_050)
    (data / "cut.wav").write_bytes(b"no sound")
    rows = [
        {"id": "file", "question": "<audio>Which?", "answer": "7", "audio": "a.flac"},
        {"id": "array", "question": "<audio>and <audio>?", "answer": "8",
         "audios": [{"array": samples[:, 0].tolist(), "sampling_rate": 8000}, "a.flac"]},
        {"id": "bad", "question": "<audio>Which?", "answer": "7", "audio": "cut.wav"},
        {"id": "text", "question": "1 + 1?", "answer": "2"},
    ]  # fmt: skip
    limits = media.AudioLimits(load_config(["experiment=digits"]).data.audio, 16_000, 16_000)
    for old, new in converted(data, tmp_path / "out", rows, bad="cut.wav"):
        for sound, wanted in zip(new.audios, old.audios, strict=True):
            found, expected = (media.load_audio(each, limits) for each in (sound, wanted))
            assert found.contents == expected.contents, "a file is written as it is"
            np.testing.assert_array_equal(*(media.decode_audio(each, limits) for each in (found, expected)))


def test_a_conversion_refuses_what_it_cannot_do(folder: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "out", (f"data.path={folder}", "data=jsonl")
    for words, message in (
        ((str(folder), *source), "is there and not an empty folder"),
        ((str(out), "--split", "train", *source), "more than data.max_skipped_fraction=0.1 of the split train"),
        ((str(out), "--split", "valid", *source), "valid.jsonl does not exist"),
    ):
        result = run("convert", *words)
        assert result.exit_code == 2, result.output
        assert message in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("command", [("convert", "new"), ("inspect",)])
def test_an_option_of_another_reader_is_refused_before_data_are_read(tmp_path: Path, command: tuple[str, ...]) -> None:
    for word in ("data.huggingface.subset=hard", "data.huggingface.streamed_rows=5"):
        found = run(*command, "data=jsonl", f"data.path={tmp_path / 'none'}", word)
        assert found.exit_code == 2
        assert f"{word} is not read with data.kind=jsonl" in found.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_samples_lengths_labels_and_what_is_skipped(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("inspect", "data=jsonl", f"data.path={folder}", "--output", str(page))
    assert result.exit_code == 0, result.output
    assert "5 rows, 3 checked and usable, 2 skipped" in result.output.replace("\n", " ")
    text = page.read_text()
    assert text.count("<article") == 3 and text.count("data:image/png;base64,") == 3
    for shown in ("missing_file", "duplicate_id", "train.jsonl:4 (lost)", "<dt>digit</dt><dd>1</dd>", "characters"):
        assert shown in text
    assert "1 + 1? &lt;b&gt;&amp;amp;&lt;/b&gt;" in text and "&lt;lost&gt;" in text, "data are escaped"
    assert "http://" not in text and "https://" not in text and "<script" not in text


def test_the_page_shows_frames_of_videos(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mkv", noise_frames(8, (24, 16)), rate=4)
    row = {"question": "<video>Which?", "answer": "7", "video": "clip.mkv"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    page = tmp_path / "page.html"
    result = run("inspect", "data=jsonl", f"data.path={tmp_path}", "--output", str(page))
    assert result.exit_code == 0, result.output
    [encoded] = re.findall(r"data:image/png;base64,([^\"]+)", page.read_text())
    with Image.open(BytesIO(base64.b64decode(encoded))) as strip:
        assert strip.size == (4 * 24, 16)


def test_a_page_is_written_where_no_row_is_usable(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "q"}\n')
    page = tmp_path / "page.html"
    assert run("inspect", "data=jsonl", f"data.path={tmp_path}", "--output", str(page)).exit_code == 0
    assert "missing_answer" in page.read_text() and "nothing to draw" in page.read_text()


def test_a_histogram_counts_every_length_once() -> None:
    assert histogram([]) == ([], [])
    one, _ = histogram([5, 5, 5])
    assert [bar[2] for bar in one] == [100.0]
    many, _ = histogram(list(range(100)))
    assert len(many) == 40
    assert sum(int(bar[3].split(": ")[1].split()[0]) for bar in many) == 100
