"""Data that tasks write themselves: true to their images and sounds, balanced, the same for the same seed."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from mobula.actors.datasets.conversations import read_conversations
from mobula.actors.datasets.open_split import open_split
from mobula.actors.processors.media import AudioLimits, check_audio, decode_video, load_video
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import ensure_data
from mobula.examples.digits.digit_clips import CENTRE, DRIFT, FRAME_MS, LENGTHS, NUM_FRAMES, SIZE, UPSCALE
from mobula.examples.digits.digits import write_digits
from mobula.examples.easy_vqa.easy_vqa import write_easy_vqa
from mobula.examples.geospot.gazetteer import GazetteerCity
from mobula.examples.geospot.geospot import MARK, draw_map, draw_world, write_places
from mobula.examples.shapes.captioning import describe, keywords_of, write_captioning
from mobula.examples.shapes.nlvr2 import write_nlvr2
from mobula.examples.shapes.shapes import BACKGROUND, COLORS, Shape
from mobula.examples.sums.sums import write_sums
from mobula.examples.tones.tones import PATTERNS, RATE, tone, write_tones
from mobula.learner.policies.tiny.writing import build_tokenizer

SPLITS = ("train", "validation", "test")
DIGITS = {"train": 1297, "validation": 200, "test": 300}  # images of each split
NUM_IMAGES = {"digits": range(1, 2), "digit_sum": range(2, 3), "digit_list": range(1, 13)}
LETTERS = "ABCDEFGHIJKL"
STAGES = {"country": 0, "city": 100, "full": 1000}
WRITERS: dict[str, Any] = {
    **{task: partial(write_digits, task=task) for task in (*NUM_IMAGES, "digit_clips")},
    "sums": write_sums,
    "tones": partial(write_tones, num_train=20, num_validation=10, num_test=10),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    return {name: write(root / name) for name, write in WRITERS.items()}


def read(folder: Path, *splits: str) -> list[dict[str, Any]]:
    files = [folder / f"{split}.jsonl" for split in splits or SPLITS]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    """All but the marker, which holds the seed."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "dataset.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_arguments_write_the_same_bytes(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert contents(WRITERS[name](tmp_path / name)) == contents(folders[name])


@pytest.mark.parametrize("name", ["digits", "sums", "tones"])
def test_another_seed_writes_others(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert contents(WRITERS[name](tmp_path / name, seed=1)) != contents(folders[name])


def test_a_finished_folder_is_left_alone(folders: dict[str, Path]) -> None:
    folder = folders["digits"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert write_digits(folder, task="digits") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_killed_run_leaves_nothing_at_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_space(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", out_of_space)
        with pytest.raises(OSError, match="no space left"):
            write_digits(tmp_path / "digits", task="digits")
    assert list(tmp_path.iterdir()) == []
    assert (write_digits(tmp_path / "digits", task="digits") / "test.jsonl").is_file()


def test_folders_of_something_else_and_unknown_tasks_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    for folder, task, message in (
        (folders["digits"], "digit_sum", "choose another folder or delete this one"),
        (tmp_path, "digits", r"has no dataset\.json"),
        (tmp_path / "new", "letters", "known are digits, digit_sum, digit_list"),
    ):
        with pytest.raises(ValueError, match=message):
            write_digits(folder, task=task)  # type: ignore[arg-type]
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def images_of(row: dict[str, Any]) -> list[str]:
    return [row["image"]] if isinstance(row["image"], str) else row["image"]


@pytest.mark.parametrize("task", NUM_IMAGES)
def test_rows_of_digits_follow_the_schema_and_splits_share_no_image(folders: dict[str, Path], task: str) -> None:
    rows = {split: read(folders[task], split) for split in SPLITS}
    assert {split: len(found) for split, found in rows.items()} == DIGITS
    every = [row for found in rows.values() for row in found]
    assert len({row["id"] for row in every}) == len(every)
    for row in every:
        assert row.keys() == {"id", "question", "answer", "solution", "image"}
        assert row["question"].count("<image>") == len(images_of(row)) and len(images_of(row)) in NUM_IMAGES[task]
        assert task == "digit_list" or row["solution"] == rf"\boxed{{{row['answer']}}}"
    images = {split: {path for row in found for path in images_of(row)} for split, found in rows.items()}
    assert {split: len(paths) for split, paths in images.items()} == DIGITS
    assert len(set.union(*images.values())) == sum(DIGITS.values())


def test_splits_are_stratified(folders: dict[str, Path]) -> None:
    for split, size in DIGITS.items():
        counts = Counter(row["answer"] for row in read(folders["digits"], split))
        assert counts.keys() == set("0123456789")
        assert all(0.08 < count / size < 0.12 for count in counts.values())


def test_images_show_the_digit_of_the_answer(folders: dict[str, Path]) -> None:
    pixels, labels = load_digits(return_X_y=True)
    for row in read(folders["digits"], "test"):
        index = int(row["id"].removeprefix("digit-"))
        with Image.open(folders["digits"] / row["image"]) as image:
            assert image.size == (56, 56)
            shown = np.asarray(image)[3::7, 3::7]  # [8, 8]
        assert np.abs(shown / 255 * 16 - pixels[index].reshape(8, 8)).max() < 0.1
        assert row["answer"] == str(labels[index])


def test_sums_and_lists_name_the_digits_of_their_images(folders: dict[str, Path]) -> None:
    digit = {row["image"]: int(row["answer"]) for row in read(folders["digits"])}
    for row in read(folders["digit_sum"]):
        left, right = row["image"]
        assert left != right and int(row["answer"]) == digit[left] + digit[right]
    for row in read(folders["digit_list"]):
        digits = [digit[path] for path in row["image"]]
        sentences = [f"Picture {letter} is the digit {d}." for letter, d in zip(LETTERS, digits, strict=False)]
        assert row["solution"].split("\n") == [*sentences, f"The sum is {sum(digits)}."]
        assert row["answer"] == str(sum(digits))
        assert row["question"].startswith("".join(f"<image>{letter}" for letter in LETTERS[: len(digits)]))


def test_lists_differ_in_length_and_use_all_images_equally_often(folders: dict[str, Path]) -> None:
    for split in SPLITS:
        rows = read(folders["digit_list"], split)
        assert {len(row["image"]) for row in rows} == set(NUM_IMAGES["digit_list"])
        uses = Counter(path for row in rows for path in row["image"])
        assert max(uses.values()) - min(uses.values()) <= 1
    tokenizer = build_tokenizer()
    lengths = [len(tokenizer(row["solution"]).input_ids) + 1 for row in read(folders["digit_list"])]  # with EOS
    assert (min(lengths), max(lengths)) == (24, 201)


@pytest.fixture
def clips(folders: dict[str, Path]) -> Path:
    return folders["digit_clips"]


def test_every_digit_has_a_clip_in_which_it_is_shown_longest(clips: Path) -> None:
    _, labels = load_digits(return_X_y=True)
    rows = read(clips)
    indices = [int(row["id"].removeprefix("digit_clips-")) for row in rows]
    assert sorted(indices) == list(range(len(labels)))
    assert {split: len(read(clips, split)) for split in SPLITS} == DIGITS
    for row, index in zip(rows, indices, strict=True):
        assert row.keys() == {"id", "question", "answer", "solution", "video"}
        assert row["answer"] == str(labels[index])
        assert row["solution"] == rf"\boxed{{{row['answer']}}}" and row["question"].count("<video>") == 1


def frames_of(folder: Path, row: dict) -> np.ndarray:
    """uint8 [T, H, W] of a clip, as a run would decode it."""
    data = load_config(["experiment=digit_clips"]).data
    video = load_video(folder / row["video"], data)
    assert video.measure.timestamps == tuple(place * FRAME_MS / 1000 for place in range(NUM_FRAMES))
    return decode_video(video, data)[..., 0]


def test_clips_show_digits_of_their_own_split_one_of_them_longest(clips: Path) -> None:
    """Each frame is compared with every digit of the data at every place where it may stand."""
    pixels, labels = load_digits(return_X_y=True)
    known = {values(digit): index for index, digit in enumerate(pixels)}
    assert len(known) == len(pixels), "no two digits of the data are alike"
    owner = {int(row["id"][-4:]): split for split in SPLITS for row in read(clips, split)}
    for split in SPLITS:
        for row in read(clips, split)[:20]:
            frames = frames_of(clips, row)
            assert frames.shape == (NUM_FRAMES, SIZE, SIZE)
            shown = [known[values(cut(frame))] for frame in frames]
            lengths = Counter(shown)
            assert tuple(sorted(lengths.values(), reverse=True)) in LENGTHS
            [(longest, _)] = lengths.most_common(1)
            assert str(labels[longest]) == row["answer"]
            assert len({labels[index] for index in lengths}) == len(lengths), "no two show the same digit"
            assert {owner[index] for index in lengths} == {split}
            assert all((a != b).any() for a, b in zip(frames, frames[1:], strict=False)), (
                "every frame is one of its own"
            )


def cut(frame: np.ndarray) -> np.ndarray:
    """The 64 values of the digit in a frame, wherever it stands."""
    places = [(top, left) for top in range(2 * DRIFT + 1) for left in range(2 * DRIFT + 1)]
    size = 8 * UPSCALE
    for top, left in places:
        start, across = CENTRE - DRIFT + top, CENTRE - DRIFT + left
        large = frame[start : start + size, across : across + size]
        small = large[::UPSCALE, ::UPSCALE]
        if np.array_equal(small.repeat(UPSCALE, 0).repeat(UPSCALE, 1), large) and large.sum() == frame.sum():
            return (small.astype(float) * 16 / 255).round().reshape(-1)
    raise AssertionError("the frame holds no digit")


def values(digit: np.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in digit)


def colors_in(path: Path) -> Counter[str]:
    """Squares of the image by the color of their middle."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    names = {rgb: name for name, rgb in COLORS.items()} | {BACKGROUND: "none"}
    return Counter(names[tuple(int(v) for v in pixels[y, x])] for y in (14, 42) for x in (14, 42))


@pytest.fixture(scope="module")
def nlvr2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nlvr2(tmp_path_factory.mktemp("nlvr2") / "data")


def test_half_of_the_statements_are_true(nlvr2: Path) -> None:
    for split in SPLITS:
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
    rows = {split: read(folder, split) for split in SPLITS}
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


@pytest.mark.parametrize(
    ("task", "asked_in", "num_images", "largest"),
    [("digit_pairs", "digits", 1, 9), ("digit_sum_pairs", "digit_sum", 2, 18)],
)
def test_each_question_has_a_right_and_a_wrong_answer(
    folders: dict[str, Path], tmp_path: Path, task: str, asked_in: str, num_images: int, largest: int
) -> None:
    folder = write_digits(tmp_path / task, task=task)  # type: ignore[arg-type]
    for split in SPLITS:
        rows, asked = read(folder, split), read(folders[asked_in], split)
        assert [row["chosen"] for row in rows] == [row["solution"] for row in asked]
        wrong = [int(row["rejected"].removeprefix(r"\boxed{").removesuffix("}")) for row in rows]
        assert all(row["rejected"] != row["chosen"] for row in rows)
        assert set(wrong) <= set(range(largest + 1)) and len(set(wrong)) > largest / 2
        pairs = read_conversations(folder, split, "pair")
        assert len(pairs.rows) == len(rows) and not pairs.skipped
        assert {len(row.images) for row in pairs.rows} == {num_images}
        assert not read_conversations(folder, split, "conversation").skipped


def test_half_of_the_labelled_answers_are_right(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_digits(tmp_path / "labels", task="digit_labels")
    for split in SPLITS:
        rows, asked = read(folder, split), read(folders["digits"], split)
        answers = [row["messages"][-1]["content"] for row in rows]
        assert [row["label"] for row in rows] == [a == b["solution"] for a, b in zip(answers, asked, strict=True)]
        assert 0.4 < np.mean([row["label"] for row in rows]) < 0.6
        assert len(read_conversations(folder, split, "labelled").rows) == len(rows)


@pytest.mark.parametrize(
    ("job", "data"),
    [*product(["sft", "reward_model", "dpo"], ["digit_pairs", "digit_sum_pairs"]), ("kto", "digit_labels")],
)
def test_offline_jobs_have_a_preset_for_two_cores(tmp_path: Path, job: str, data: str) -> None:
    config = load_config([f"experiment={job}_digits", f"data={data}", f"data.path={tmp_path / 'data'}"])
    assert (config.offline.job, config.resources.device) == (job, "cpu")
    ensure_data(config)
    assert read_conversations(config.data.path, config.evaluation.split, config.offline.rows).rows


def test_a_margin_without_pairs_is_refused() -> None:
    words = ["experiment=reward_model_digits", "offline.reward_model.loss=regression"]
    with pytest.raises(ConfigError, match="offline.reward_model.margin=0.1.*offline.reward_model.loss=bradley_terry"):
        load_config([*words, "offline.reward_model.margin=0.1"])


def test_answers_are_right_and_no_pair_is_in_two_splits(folders: dict[str, Path]) -> None:
    config = load_config(["data=sums", "policy=smollm2", f"data.path={folders['sums']}"])
    pairs = []
    for split, size in zip(SPLITS, (315, 50, 100), strict=True):
        rows = open_split(config.data, split, config.rewards.label_key).rows
        assert len(rows) == size
        for place in range(size):
            left, right = map(int, re.findall(r"\d+", rows[place].question))
            assert rows[place].answer == str(left + right) and 1 <= min(left, right) and max(left, right) <= 30
            pairs.append(frozenset((left, right)))
    assert len(set(pairs)) == len(pairs) == 465


def test_rows_are_read_with_their_sounds(folders: dict[str, Path]) -> None:
    config = load_config(["experiment=tones", f"data.path={folders['tones']}"])
    split = open_split(config.data, "train", config.rewards.label_key)
    rows = [split.rows[place] for place in range(len(split.rows))]
    assert Counter(row.answer for row in rows) == {str(n): 2 for n in range(len(PATTERNS))}
    limits = AudioLimits(config.data.audio, 2 * RATE, 60 * RATE)
    assert all(0.59 < check_audio(row.audios[0], limits) / (2 * RATE) < 0.91 for row in rows)
    assert json.loads((folders["tones"] / "dataset.json").read_text())["task"] == "tones"


def test_patterns_differ_in_pitch_and_silence() -> None:
    for pattern, pitches in enumerate(PATTERNS):
        samples = tone(pattern, np.random.default_rng(pattern)).astype(float)
        quarters = np.array_split(samples, len(pitches))
        crossings = [np.abs(np.diff(np.sign(q[40:-40]))).sum() / 2 / len(q) * RATE / 2 for q in quarters]
        loud = [np.abs(q[40:-40]).mean() > 2_000 for q in quarters]
        assert loud == [pitch > 0 for pitch in pitches]
        heard = [(c, pitch) for c, pitch in zip(crossings, pitches, strict=True) if pitch > 0]
        assert all((c > d * 1.4) == (p > q) for c, p in heard for d, q in heard)


def test_easy_vqa_keeps_its_published_test_split_and_no_picture_is_in_two(tmp_path: Path) -> None:
    package = pytest.importorskip("easy_vqa", reason="the extra easy-vqa is not installed")
    folder = write_easy_vqa(tmp_path / "easy_vqa")
    rows = {split: read(folder, split) for split in SPLITS}
    assert {split: len(rows[split]) for split in SPLITS} == {"train": 34_687, "validation": 3_888, "test": 9_673}
    pictures = {split: {row["image"] for row in rows[split]} for split in SPLITS}
    assert not (pictures["train"] & pictures["validation"] or pictures["train"] & pictures["test"])
    assert {row["answer"] for row in rows["test"]} == set(package.get_answers())
    questions, answers, _ = package.get_test_questions()
    assert [(row["question"], row["answer"]) for row in rows["test"]] == [
        (f"<image>{question}", answer) for question, answer in zip(questions, answers, strict=True)
    ]
    assert sum(row["answer"] in ("yes", "no") for row in rows["test"]) / len(rows["test"]) == pytest.approx(
        0.74, abs=0.01
    )
    assert Image.open(folder / rows["test"][0]["image"]).size == (64, 64)
