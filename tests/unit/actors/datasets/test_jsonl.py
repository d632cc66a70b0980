"""Reading MAYE's JSONL schema: what is kept, and how everything that cannot be used is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_rows import read_split

from mobula.actors.datasets.rows import Row, Split, count_by_reason
from mobula.cluster.errors import DatasetError

GOOD: dict[str, Any] = {
    "id": "good",
    "question": "<image>Which?",
    "answer": "7",
    "solution": r"\boxed{7}",
    "image": "a.png",
}


def write(folder: Path, *lines: dict[str, Any] | str | bytes) -> None:
    """Write train.jsonl with two image files beside it; reading a split does not look into them."""
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(b"image")
    encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    content = b"\n".join(line.encode() if isinstance(line, str) else line for line in encoded)
    (folder / "train.jsonl").write_bytes(content + b"\n")


def read(folder: Path, *lines: dict[str, Any] | str | bytes) -> Split:
    write(folder, *lines)
    return read_split(folder, "train")


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in GOOD.items() if k != key} | ({} if key == "id" else {"id": "bad"})


def test_a_row_has_its_fields_and_absolute_image_paths(tmp_path: Path) -> None:
    split = read(tmp_path, GOOD)
    image = (tmp_path / "a.png").resolve()
    assert split.rows == (Row("good", "<image>Which?", "7", r"\boxed{7}", (image,)),)
    assert split.rows[0].references == ("7", r"\boxed{7}")
    assert split.skipped == ()


def test_images_are_one_path_a_list_or_absent(tmp_path: Path) -> None:
    two = GOOD | {"id": "two", "question": "<image>or<image>?", "image": ["b.png", "a.png"]}
    text = without("image") | {"id": "text", "question": "2+2?"}
    null = GOOD | {"id": "null", "question": "2+2?", "image": None}
    rows = read(tmp_path, GOOD, two, text, null).rows
    assert [[path.name for path in row.images] for row in rows] == [["a.png"], ["b.png", "a.png"], [], []]


@pytest.mark.parametrize(("literal", "text"), [("7", "7"), ("7.50", "7.50"), ("-1e3", "-1e3"), ('"x"', "x")])
def test_answers_keep_their_spelling(tmp_path: Path, literal: str, text: str) -> None:
    split = read(tmp_path, f'{{"id": 3, "question": "q", "answer": {literal}}}')
    assert (split.rows[0].sample_id, split.rows[0].answer) == ("3", text)


def test_a_row_without_id_and_solution_gets_its_line_and_a_boxed_answer(tmp_path: Path) -> None:
    row = read(tmp_path, GOOD, "", {"question": "q", "answer": "7"}).rows[1]
    assert (row.sample_id, row.solution) == ("train-3", r"\boxed{7}")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"id": "bad", "question": ', "broken_json"),
        (b'{"id": "\xff"}', "broken_json"),
        (r'{"id": "bad", "question": "\ud800", "answer": "7"}', "broken_json"),
        ("[" * 100_000, "broken_json"),
        (json.dumps(GOOD | {"id": "bad"})[:-1] + f', "size": {"9" * 5000}}}', "broken_json"),
        ('["a list"]', "broken_json"),
        (without("answer"), "missing_answer"),
        (GOOD | {"id": "bad", "answer": None}, "missing_answer"),
        (GOOD | {"id": "bad", "answer": ""}, "missing_answer"),
        (GOOD | {"id": "bad", "answer": []}, "missing_answer"),
        ('{"id": "bad", "question": "q", "answer": NaN}', "missing_answer"),
        ('{"id": "bad", "question": "q", "answer": "7", "answer": "8"}', "broken_json"),
        (without("question"), "missing_question"),
        (GOOD, "duplicate_id"),
        (GOOD | {"id": "bad", "image": {"file": "a.png"}}, "bad_image"),
        (GOOD | {"id": "bad", "image": "../outside.png"}, "outside_folder"),
        (GOOD | {"id": "bad", "image": "link.png"}, "outside_folder"),
        (GOOD | {"id": "bad", "image": "absent.png"}, "missing_file"),
        (GOOD | {"id": "bad", "image": "."}, "missing_file"),
        (GOOD | {"id": "bad", "image": "a\0.png"}, "missing_file"),
        (GOOD | {"id": "bad", "image": "a" * 5000}, "missing_file"),
        (GOOD | {"id": "bad", "image": "loop.png"}, "missing_file"),
        (without("image"), "placeholder_mismatch"),
        (GOOD | {"id": "bad", "image": ["a.png", "b.png"]}, "placeholder_mismatch"),
        (GOOD | {"id": "bad", "question": "Which?"}, "placeholder_mismatch"),
    ],
)
def test_an_unusable_line_is_skipped_counted_and_named(tmp_path: Path, line: Any, reason: str) -> None:
    (tmp_path / "outside.png").write_bytes(b"image")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    split = read(folder, GOOD, line, GOOD | {"id": "after"})
    assert [row.sample_id for row in split.rows] == ["good", "after"]
    assert count_by_reason(split.skipped) == {reason: 1}
    assert split.skipped[0].sample.startswith("train.jsonl:2")
    assert split.skipped[0].detail


def test_an_absolute_path_is_refused_even_below_the_folder(tmp_path: Path) -> None:
    split = read(tmp_path, GOOD, GOOD | {"id": "bad", "image": str(tmp_path / "a.png")})
    assert count_by_reason(split.skipped) == {"outside_folder": 1}


def test_a_path_that_stays_inside_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    assert read(tmp_path, GOOD | {"image": "sub/../a.png"}).rows[0].images == ((tmp_path / "a.png").resolve(),)


def test_a_missing_file_names_the_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="data.path"):
        read_split(tmp_path, "train")


@pytest.mark.parametrize("lines", [(), ("", "")])
def test_an_empty_dataset_is_an_error(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(DatasetError, match="no usable row|0 of 0|unusable"):
        read(tmp_path, *lines)


def test_a_dataset_of_unusable_rows_is_an_error_that_names_the_first_few(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"train.jsonl:1 \(bad\).*`answer`.*; \.\.\.\)"):
        read(tmp_path, *[without("answer")] * 4)


def test_what_the_schema_does_not_name_travels_as_metadata(tmp_path: Path) -> None:
    row = {"question": "2+2?", "answer": "4", "label": "sum", "limit": 7.50, "metadata": {"limit": 3, "tags": ["a"]}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "metadata": [1]}))
    split = read_split(tmp_path, "train")
    assert split.rows[0].metadata == {"label": "sum", "limit": 3, "tags": ["a"]}
    assert [skipped.reason for skipped in split.skipped] == ["bad_metadata"]
