"""Data that tasks write themselves: true to their images and sounds, balanced, the same for the same seed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mobula.actors.datasets.conversations import read_conversations
from mobula.actors.datasets.open_split import open_split
from mobula.actors.processors.media import AudioLimits, check_audio
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import ensure_data
from mobula.examples.digits.digits import write_digits
from mobula.examples.geospot.gazetteer import GazetteerCity
from mobula.examples.geospot.geospot import MARK, draw_map, draw_world, write_places
from mobula.examples.shapes.captioning import describe, keywords_of, write_captioning
from mobula.examples.shapes.nlvr2 import write_nlvr2
from mobula.examples.shapes.shapes import BACKGROUND, COLORS, Shape
from mobula.examples.sums.sums import write_sums
from mobula.examples.tones.tones import PATTERNS, RATE, tone, write_tones

STAGES = {"country": 0, "city": 100, "full": 1000}


def read(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def colors_in(path: Path) -> Counter[str]:
    """Squares of the image by the color of their middle."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    names = {rgb: name for name, rgb in COLORS.items()} | {BACKGROUND: "none"}
    return Counter(names[tuple(int(v) for v in pixels[y, x])] for y in (14, 42) for x in (14, 42))


@pytest.fixture(scope="module")
def nlvr2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nlvr2(tmp_path_factory.mktemp("nlvr2") / "data")


def test_half_of_the_statements_are_true(nlvr2: Path) -> None:
    for split in ("train", "validation", "test"):
        rows = read(nlvr2, split)
        assert Counter(row["answer"] for row in rows) == {"True": len(rows) / 2, "False": len(rows) / 2}
        assert len({row["id"] for row in rows}) == len(rows)


def test_statements_hold_of_their_images(nlvr2: Path) -> None:
    """Those on colors and numbers, read back from the pixels."""
    num_checked = 0
    for row in read(nlvr2, "test"):
        statement = row["question"].removeprefix("<image><image>Look at the two images. ")
        left, right = (colors_in(nlvr2 / name) for name in row["image"])
        if statement.startswith("The left image has more shapes"):
            assert str(4 - left["none"] > 4 - right["none"]) == row["answer"]
            num_checked += 1
        elif statement.startswith("The") and "contains a" in statement:
            color = statement.split("contains a ")[1].split()[0]
            assert str((left if " left " in statement else right)[color] > 0) == row["answer"]
            num_checked += 1
    assert num_checked == 100


def test_captions_name_what_the_image_shows(tmp_path: Path) -> None:
    folder = write_captioning(tmp_path / "data")
    for row in read(folder, "test"):
        shown = {color for color in colors_in(folder / row["image"]) if color != "none"}
        assert shown == set(row["metadata"]["keywords"]) & set(COLORS)
        assert all(keyword in row["answer"].lower() for keyword in row["metadata"]["keywords"])
    scene = (Shape("red", "circle"), None, Shape("red", "circle"), Shape("blue", "square"))
    assert describe(scene) == "Two red circles and a blue square."
    assert keywords_of(describe(scene)) == ["two", "red", "circles", "blue", "square"]


def places() -> list[GazetteerCity]:
    """Invented cities, so that no package is needed."""
    random = np.random.default_rng(0)
    spots = random.uniform((-60, -180), (70, 180), (2000, 2))
    return [GazetteerCity(f"C{n}", f"R{n % 40}", f"N{n % 4}", float(a), float(b)) for n, (a, b) in enumerate(spots)]


def test_places_are_asked_once_and_stages_begin_where_they_should(tmp_path: Path) -> None:
    folder = write_places(tmp_path / "data", places(), STAGES)
    rows = {split: read(folder, split) for split in ("train", "validation", "test")}
    cities = [row["metadata"]["city"] for split in rows.values() for row in split]
    assert len(set(cities)) == len(cities) == 1800
    stages = Counter(row["metadata"]["stage"] for row in rows["train"])
    assert stages == {"country": 100, "city": 900, "full": 500}
    assert {row["metadata"]["stage"] for row in rows["test"]} == {"full"}
    assert [row["metadata"]["stage_number"] for row in rows["train"][99:101]] == [0, 1]


@pytest.mark.parametrize(("latitude", "longitude"), [(0.0, 0.0), (-41.3, 174.8), (71.0, -179.9), (-77.8, 179.99)])
def test_a_map_marks_the_place(latitude: float, longitude: float) -> None:
    points = np.array([(latitude, longitude), (latitude + 1.0, -longitude)])
    image = draw_map(draw_world(points), points, latitude, longitude)
    assert image.shape == (112, 112, 3)
    rows, columns = np.nonzero((image[:56] == MARK).all(-1))
    assert 90 - rows.mean() * 180 / 56 == pytest.approx(latitude, abs=5)
    assert columns.mean() * 360 / 112 - 180 == pytest.approx(longitude, abs=5)


@pytest.mark.parametrize("write", [write_nlvr2, write_captioning])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, write: Any) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"has no dataset\.json"):
        write(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("task", "asked_in", "num_images", "largest"),
    [("digit_pairs", "digits", 1, 9), ("digit_sum_pairs", "digit_sum", 2, 18)],
)
def test_each_question_has_a_right_and_a_wrong_answer(
    tmp_path: Path, task: str, asked_in: str, num_images: int, largest: int
) -> None:
    folder = write_digits(tmp_path / task, task=task)  # type: ignore[arg-type]
    questions = write_digits(tmp_path / "questions", task=asked_in)  # type: ignore[arg-type]
    for split in ("train", "validation", "test"):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        asked = [json.loads(line) for line in (questions / f"{split}.jsonl").read_text().splitlines()]
        assert [row["chosen"] for row in rows] == [row["solution"] for row in asked]
        wrong = [int(row["rejected"].removeprefix(r"\boxed{").removesuffix("}")) for row in rows]
        assert all(row["rejected"] != row["chosen"] for row in rows)
        assert set(wrong) <= set(range(largest + 1)) and len(set(wrong)) > largest / 2
        pairs = read_conversations(folder, split, "pair")
        assert len(pairs.rows) == len(rows) and not pairs.skipped
        assert {len(row.images) for row in pairs.rows} == {num_images}
        assert not read_conversations(folder, split, "conversation").skipped


@pytest.mark.parametrize("job", ["sft", "reward_model", "dpo"])
@pytest.mark.parametrize("data", ["digit_pairs", "digit_sum_pairs"])
def test_offline_jobs_have_a_preset_for_two_cores(tmp_path: Path, job: str, data: str) -> None:
    config = load_config([f"experiment={job}_digits", f"data={data}", f"data.path={tmp_path / 'data'}"])
    assert (config.offline.job, config.resources.device) == (job, "cpu")
    ensure_data(config)
    assert read_conversations(config.data.path, config.evaluation.split, config.offline.rows).rows


def test_a_margin_without_pairs_is_refused() -> None:
    words = ["experiment=reward_model_digits", "offline.reward_model.loss=regression"]
    with pytest.raises(ConfigError, match="offline.reward_model.margin=0.1.*offline.reward_model.loss=bradley_terry"):
        load_config([*words, "offline.reward_model.margin=0.1"])


SPLITS = ("train", "validation", "test")


def test_answers_are_right_and_no_pair_is_in_two_splits(tmp_path: Path) -> None:
    config = load_config(["data=sums", "policy=smollm2", f"data.path={write_sums(tmp_path / 'sums')}"])
    pairs = []
    for split, size in zip(SPLITS, (315, 50, 100), strict=True):
        rows = open_split(config.data, split, config.rewards.label_key).rows
        assert len(rows) == size
        for place in range(size):
            left, right = map(int, re.findall(r"\d+", rows[place].question))
            assert rows[place].answer == str(left + right) and 1 <= min(left, right) and max(left, right) <= 30
            pairs.append(frozenset((left, right)))
    assert len(set(pairs)) == len(pairs) == 465


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    a, b, c = (write_sums(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    for split in SPLITS:
        first, same, other = ((folder / f"{split}.jsonl").read_bytes() for folder in (a, b, c))
        assert first == same != other
    with pytest.raises(ValueError, match="choose another folder or delete this one"):
        write_sums(a, seed=1)


def write(folder: Path, seed: int = 0) -> Path:
    return write_tones(folder, seed=seed, num_train=20, num_validation=10, num_test=10)


def test_the_same_arguments_give_the_same_sounds(tmp_path: Path) -> None:
    a, b, c = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", seed=1)
    files = sorted(path.relative_to(a) for path in a.rglob("*") if path.is_file())
    assert len(files) == 40 + 4
    assert all((a / file).read_bytes() == (b / file).read_bytes() for file in files)
    assert (a / files[-1]).read_bytes() != (c / files[-1]).read_bytes()
    assert write(a) == a
    with pytest.raises(ValueError, match="choose another folder or delete this one"):
        write(a, seed=1)


def test_rows_are_read_with_their_sounds(tmp_path: Path) -> None:
    config = load_config(["experiment=tones", f"data.path={write(tmp_path / 'tones')}"])
    split = open_split(config.data, "train", config.rewards.label_key)
    rows = [split.rows[place] for place in range(len(split.rows))]
    assert Counter(row.answer for row in rows) == {str(n): 2 for n in range(len(PATTERNS))}
    limits = AudioLimits(config.data.audio, 2 * RATE, 60 * RATE)
    assert all(0.59 < check_audio(row.audios[0], limits) / (2 * RATE) < 0.91 for row in rows)
    assert json.loads((tmp_path / "tones" / "dataset.json").read_text())["task"] == "tones"


def test_patterns_differ_in_pitch_and_silence() -> None:
    for pattern, pitches in enumerate(PATTERNS):
        samples = tone(pattern, np.random.default_rng(pattern)).astype(float)
        quarters = np.array_split(samples, len(pitches))
        crossings = [np.abs(np.diff(np.sign(q[40:-40]))).sum() / 2 / len(q) * RATE / 2 for q in quarters]
        loud = [np.abs(q[40:-40]).mean() > 2_000 for q in quarters]
        assert loud == [pitch > 0 for pitch in pitches]
        heard = [(c, pitch) for c, pitch in zip(crossings, pitches, strict=True) if pitch > 0]
        assert all((c > d * 1.4) == (p > q) for c, p in heard for d, q in heard)
