"""The digits dataset: MAYE's schema, disjoint stratified splits, one content for one set of arguments."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from mobula.actors.processors.media import decode_video, load_video
from mobula.configs.load import load_config
from mobula.examples.digits.digit_clips import CENTRE, DRIFT, FRAME_MS, LENGTHS, NUM_FRAMES, SIZE, UPSCALE
from mobula.examples.digits.digits import DigitsTask, write_digits
from mobula.learner.policies.tiny.writing import build_tokenizer

SPLITS = {"train": 1297, "validation": 200, "test": 300}
TASKS: tuple[DigitsTask, ...] = ("digits", "digit_sum", "digit_list")
NUM_IMAGES = {"digits": range(1, 2), "digit_sum": range(2, 3), "digit_list": range(1, 13)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[DigitsTask, Path]:
    root = tmp_path_factory.mktemp("data")
    return {task: write_digits(root / task, task=task) for task in TASKS}


def read(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def images_of(row: dict) -> list[str]:
    return [row["image"]] if isinstance(row["image"], str) else row["image"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", SPLITS)
def test_rows_follow_the_schema(folders: dict[DigitsTask, Path], task: DigitsTask, split: str) -> None:
    rows = read(folders[task], split)
    assert len(rows) == SPLITS[split]
    for row in rows:
        assert row.keys() == {"id", "question", "answer", "solution", "image"}
        assert row["question"].count("<image>") == len(images_of(row))
        assert len(images_of(row)) in NUM_IMAGES[task]
        if task != "digit_list":
            assert row["solution"] == rf"\boxed{{{row['answer']}}}"


@pytest.mark.parametrize("task", TASKS)
def test_ids_are_unique(folders: dict[DigitsTask, Path], task: DigitsTask) -> None:
    ids = [row["id"] for split in SPLITS for row in read(folders[task], split)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_image_and_use_all(folders: dict[DigitsTask, Path], task: DigitsTask) -> None:
    images = {split: {path for row in read(folders[task], split) for path in images_of(row)} for split in SPLITS}
    assert {split: len(paths) for split, paths in images.items()} == SPLITS
    assert len(set.union(*images.values())) == sum(SPLITS.values())


def test_splits_are_stratified(folders: dict[DigitsTask, Path]) -> None:
    for split, size in SPLITS.items():
        counts = Counter(row["answer"] for row in read(folders["digits"], split))
        assert counts.keys() == set("0123456789")
        assert all(0.08 < count / size < 0.12 for count in counts.values())


def test_images_show_the_digit_of_the_answer(folders: dict[DigitsTask, Path]) -> None:
    pixels, labels = load_digits(return_X_y=True)
    for row in read(folders["digits"], "test"):
        index = int(row["id"].removeprefix("digit-"))
        with Image.open(folders["digits"] / row["image"]) as image:
            assert image.size == (56, 56)
            shown = np.asarray(image)[3::7, 3::7]  # [8, 8]
        assert np.abs(shown / 255 * 16 - pixels[index].reshape(8, 8)).max() < 0.1
        assert row["answer"] == str(labels[index])


def test_sums_add_two_different_images(folders: dict[DigitsTask, Path]) -> None:
    digit = {row["image"]: int(row["answer"]) for split in SPLITS for row in read(folders["digits"], split)}
    for split in SPLITS:
        for row in read(folders["digit_sum"], split):
            left, right = row["image"]
            assert left != right
            assert int(row["answer"]) == digit[left] + digit[right]


def test_lists_name_every_image_in_its_place_and_the_sum(folders: dict[DigitsTask, Path]) -> None:
    digit = {row["image"]: int(row["answer"]) for split in SPLITS for row in read(folders["digits"], split)}
    for split in SPLITS:
        for row in read(folders["digit_list"], split):
            digits = [digit[path] for path in row["image"]]
            *sentences, last = row["solution"].split("\n")
            assert sentences == [f"Picture {'ABCDEFGHIJKL'[i]} is the digit {d}." for i, d in enumerate(digits)]
            assert last == f"The sum is {sum(digits)}."
            assert row["answer"] == str(sum(digits))
            assert row["question"].startswith("".join(f"<image>{label}" for label in "ABCDEFGHIJKL"[: len(digits)]))


def test_lists_differ_in_length_and_use_all_images_equally_often(folders: dict[DigitsTask, Path]) -> None:
    for split in SPLITS:
        rows = read(folders["digit_list"], split)
        assert {len(row["image"]) for row in rows} == set(NUM_IMAGES["digit_list"])
        uses = Counter(path for row in rows for path in row["image"])
        assert max(uses.values()) - min(uses.values()) <= 1


def test_answers_to_lists_take_24_to_201_tokens_of_the_tiny_model(folders: dict[DigitsTask, Path]) -> None:
    tokenizer = build_tokenizer()
    lengths = [
        len(tokenizer(row["solution"]).input_ids) + 1  # EOS
        for split in SPLITS
        for row in read(folders["digit_list"], split)
    ]
    assert (min(lengths), max(lengths)) == (24, 201)


def test_same_arguments_write_the_same_bytes(folders: dict[DigitsTask, Path], tmp_path: Path) -> None:
    for task in TASKS:
        assert contents(write_digits(tmp_path / f"again_{task}", task=task)) == contents(folders[task])
    other = write_digits(tmp_path / "other", task="digits", seed=1)
    assert read(other, "test") != read(folders["digits"], "test")


def test_a_finished_folder_is_left_alone(folders: dict[DigitsTask, Path]) -> None:
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


def test_another_dataset_in_the_folder_is_refused(folders: dict[DigitsTask, Path]) -> None:
    with pytest.raises(ValueError, match="choose another folder"):
        write_digits(folders["digits"], task="digits", seed=1)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"has no dataset\.json"):
        write_digits(tmp_path, task="digits")
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="known are digits, digit_sum, digit_list"):
        write_digits(tmp_path / "digits", task="letters")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digit_clips", task="digit_clips")


def frames_of(folder: Path, row: dict) -> np.ndarray:
    """uint8 [T, H, W] of a clip, as a run would decode it."""
    data = load_config(["experiment=digit_clips"]).data
    video = load_video(folder / row["video"], data)
    assert video.measure.timestamps == tuple(place * FRAME_MS / 1000 for place in range(NUM_FRAMES))
    return decode_video(video, data)[..., 0]


def test_every_digit_has_a_clip_in_which_it_is_shown_longest(clips: Path) -> None:
    _, labels = load_digits(return_X_y=True)
    rows = {split: read(clips, split) for split in SPLITS}
    assert {split: len(found) for split, found in rows.items()} == SPLITS
    indices = [int(row["id"].removeprefix("digit_clips-")) for found in rows.values() for row in found]
    assert sorted(indices) == list(range(len(labels)))
    for found in rows.values():
        for row in found:
            assert row.keys() == {"id", "question", "answer", "solution", "video"}
            assert row["answer"] == str(labels[int(row["id"].removeprefix("digit_clips-"))])
            assert row["solution"] == rf"\boxed{{{row['answer']}}}" and row["question"].count("<video>") == 1


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


def test_clips_are_the_same_bytes_for_the_same_seed(clips: Path, tmp_path: Path) -> None:
    again = write_digits(tmp_path / "again", task="digit_clips")
    assert contents(again) == contents(clips)
