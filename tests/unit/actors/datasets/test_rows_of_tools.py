"""Rows as pandas, Arrow and datasets write them: missing values, one image or a list, and values of many types."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import conversation_rows, encoded, read_records, read_split, record_of_each_format, write_rows
from PIL import Image

from mobula.actors.datasets.conversations import read_conversations
from mobula.actors.datasets.formats.base import text_of
from mobula.actors.datasets.readers.arrow import fingerprint_of
from mobula.actors.datasets.readers.files import without_nulls
from mobula.cluster.errors import DatasetError

TURN = {"role": "user", "content": "<image>Which?"}
ANSWER = {"role": "assistant", "content": "7"}
WITH_AN_IMAGE = record_of_each_format("<image>Which?", "7")  # but for the image
BASE64 = base64.b64encode(encoded(Image.new("RGB", (56, 56)))).decode()
MEDIA = ("image", "images", "video", "videos", "audio", "audios")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    return tmp_path


@pytest.mark.parametrize("row_format", WITH_AN_IMAGE)
@pytest.mark.parametrize("column", ["image", "images"])
def test_one_image_or_a_list_is_read_under_both_names(folder: Path, row_format: str, column: str) -> None:
    values = ["a.png", ["a.png"], [["a.png"]], {"path": "a.png", "bytes": None}, [{"path": "a.png"}, None]]
    for row in read_records(folder, row_format, *(WITH_AN_IMAGE[row_format] | {column: value} for value in values)):
        assert (row.question, row.images, row.answer) == ("<image>Which?", ((folder / "a.png").resolve(),), "7")


@pytest.mark.parametrize("row_format", WITH_AN_IMAGE)
@pytest.mark.parametrize("missing", ["null", "NaN", "[]", "[null]", '""', '{"path": null, "bytes": null}'])
def test_a_column_of_media_without_a_value_is_absent(folder: Path, row_format: str, missing: str) -> None:
    text = json.dumps(WITH_AN_IMAGE[row_format]).replace("<image>", "")[:-1]
    nulls = "".join(f', "{column}": {missing}' for column in MEDIA)
    rows = read_records(
        folder, row_format, *[f'{text}{nulls}, "id": null, "solution": NaN, "metadata": null, "system": null}}'] * 3
    )
    assert [row.sample_id for row in rows] == ["train-1", "train-2", "train-3"]
    assert {(row.question, row.images, row.answer, len(row.metadata)) for row in rows} == {("Which?", (), "7", 0)}


def test_fields_that_arrow_fills_in_are_absent(folder: Path) -> None:
    parts = [{"type": "image", "image": "a.png", "text": None}, {"type": "text", "text": "Which?", "image": None}]
    turns = [{"role": "user", "content": parts, "tool_calls": None}]
    row = {"messages": turns, "answer": "7", "images": None, "weight": float("nan"), "id": None}
    pq.write_table(pa.Table.from_pylist([row, {**row, "images": []}]), folder / "train.parquet")
    split = read_split(folder, "train", "parquet", row_format="messages")
    assert [(row.question, len(row.images), row.metadata) for row in split.rows] == [("<image>Which?", 1, {})] * 2


@pytest.mark.parametrize("row_format", ["question", "verl"])
def test_a_frame_of_pandas_with_missing_values_is_read(folder: Path, row_format: str) -> None:
    rows = [
        WITH_AN_IMAGE[row_format] | {"images": ["a.png"], "id": "x"},
        {**WITH_AN_IMAGE[row_format], "image": "a.png"},
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    split = read_split(folder, "train", "parquet", row_format=row_format)
    assert [len(row.images) for row in split.rows] == [1, 1]
    assert split.skipped == ()


def test_missing_values_of_every_library_are_absent() -> None:
    missing = [None, float("nan"), np.nan, np.float32("nan"), np.datetime64("NaT"), pd.NA, pd.NaT, Decimal("NaN")]
    record = {
        "a": 1,
        **{f"m{n}": value for n, value in enumerate(missing)},
        "b": {"c": pd.NA, "d": ""},
        "e": missing[:2],
    }
    assert without_nulls(record) == {"a": 1, "b": {"d": ""}, "e": [None, None]}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (" 7 \n", " 7 \n"), ("007", "007"), ("1e3", "1e3"), ("nan", "nan"), ("None", "None"), (True, "true"),
        (np.int64(7), "7"), (np.float64(0.5), "0.5"), (np.bool_(False), "false"), (np.str_("x"), "x"),
        (Decimal("7.50"), "7.50"), (date(2024, 2, 9), "2024-02-09"), (datetime(2024, 2, 9, 1), "2024-02-09T01:00:00"),
        ({"a": [1, "é", None, Decimal("1.0")]}, '{"a": [1, "é", null, 1.0]}'), (["x", True], '["x", true]'),
        (np.array([1, 2]), "[1, 2]"), (np.float32(0.1), "0.1"), (np.array([0.1], np.float16), "[0.1]"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    ],
)  # fmt: skip
def test_an_answer_is_kept_to_the_letter(value: Any, text: str) -> None:
    assert text_of(value, "answer") == text


@pytest.mark.parametrize(
    ("literal", "text"),
    [('" 7 "', " 7 "), ('"007"', "007"), ("1e3", "1e3"), ("7.50", "7.50"), ("true", "true")],
)  # fmt: skip
def test_a_ground_truth_of_a_file_is_kept_to_the_letter(folder: Path, literal: str, text: str) -> None:
    assert read_records(folder, "question", f'{{"question": "?", "answer": {literal}}}')[0].answer == text
    [row] = read_records(folder, "verl", f'{{"prompt": "?", "reward_model": {{"ground_truth": {literal}}}}}')
    assert row.answer == text


@pytest.mark.parametrize(
    ("row_format", "record"),
    [
        ("question", {"question": [{"role": "user", "content": "?"}], "answer": "7"}),
        ("question", {"question": {"0": "?"}, "answer": {"0": "7"}}),
        ("alpaca", {"instruction": ["?"], "output": "7"}),
        ("alpaca", {"instruction": "?", "system": {"text": "Be brief."}, "output": "7"}),
    ],
)
def test_turns_and_columns_of_all_rows_are_no_question(folder: Path, row_format: str, record: Any) -> None:
    usable = WITH_AN_IMAGE[row_format] | {"image": "a.png"}
    skipped = read_split(write_rows(folder, record, usable), row_format=row_format).skipped
    assert "write a text, or chat turns with data.row_format=messages" in skipped[0].detail


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "a.png", "text": None},
        {"type": "image", "base64": BASE64},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
        {"type": "image_url", "image_url": {"url": f"DATA:image/png;base64,{BASE64}", "detail": "low"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{BASE64}"},
    ],
)
def test_the_parts_of_every_api_hold_an_image(folder: Path, part: dict[str, Any]) -> None:
    turn = {"role": "user", "content": [part, {"type": "text", "text": "?"}]}
    [row] = read_records(folder, "messages", {"messages": [turn], "answer": "7"})
    assert (row.question, len(row.images)) == ("<image>?", 1)
    [conversation] = conversation_rows(folder, {"messages": [turn, ANSWER]})
    assert len(conversation.images) == 1


@pytest.mark.parametrize("url", ["s3://lab/a.png", "gs://lab/a.png", "hf://datasets/a.png", "ftp://lab/a.png"])
def test_urls_that_are_not_read_are_named(folder: Path, url: str) -> None:
    rows = [{"question": "<image>?", "answer": "7", "image": name} for name in (url, f"FILE://{folder}/a.png")]
    split = read_split(write_rows(folder, *rows))
    assert len(split.rows) == 1
    assert f"'{url}' is a URL that is not read" in split.skipped[0].detail


def test_messages_of_a_developer_are_of_the_system(folder: Path) -> None:
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "?"}]
    [row] = read_records(folder, "messages", {"messages": turns, "answer": "7"})
    assert [(turn.role, turn.text) for turn in row.history] == [("system", "Be brief.")]
    [conversation] = conversation_rows(folder, {"messages": [*turns, ANSWER]})
    assert [turn.role for turn in conversation.context] == ["system", "user"]


def test_the_message_of_a_skipped_row_has_the_users_own_column(folder: Path) -> None:
    rows = [
        {"problem": "2 + 5?", "truth": {"text": "7"}},
        {"problem": "2 + 6?", "truth": {"text": None}},
        {"truth": {"text": "1"}},
    ]
    split = read_split(write_rows(folder, *rows), columns={"question": "problem", "answer": "truth.text"})
    assert [str(skipped) for skipped in split.skipped] == [
        "train.jsonl:2: the row has no `truth.text`: add it",
        "train.jsonl:3: the row has no `problem`: add it",
    ]


def test_images_under_another_name_are_asked_for_by_the_key(folder: Path) -> None:
    rows = [{"question": "<image>?", "answer": "7", "photo": "a.png"}, {"question": "?", "answer": "7"}]
    [skipped] = read_split(write_rows(folder, *rows)).skipped
    assert "data.columns={images: COLUMN}" in skipped.detail


@pytest.mark.parametrize("column", ["id", "image", "images", "video", "videos", "audio", "audios", "system"])
@pytest.mark.parametrize("missing", ["null", "NaN", '""'])
def test_rows_of_offline_jobs_may_have_nulls(folder: Path, column: str, missing: str) -> None:
    messages = [{"role": role, "content": "7", "weight": None} for role in ("user", "assistant")]
    rows = conversation_rows(folder, *[f'{{"messages": {json.dumps(messages)}, "{column}": {missing}}}'] * 3)
    assert [row.sample_id for row in rows] == ["train-1", "train-2", "train-3"]
    assert all(row.endings[0].turns[0].is_trained for row in rows)


def test_compressed_rows_of_offline_jobs_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl.gz").write_bytes(b"x")
    with pytest.raises(DatasetError, match="train.jsonl.gz is compressed: unpack it"):
        read_conversations(tmp_path, "train", "conversation")


def test_one_image_of_an_offline_row_needs_no_list(folder: Path) -> None:
    row = {"messages": [TURN, ANSWER]}
    rows = [row | {"image": "a.png"}, row | {"images": "a.png"}, row | {"image": ["a.png", None]}]
    (folder / "train.jsonl").write_text("\ufeff" + "\r\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [len(row.images) for row in read_conversations(folder, "train", "conversation").rows] == [1, 1, 1]


def test_rows_with_equal_ids_are_skipped_or_numbered(folder: Path) -> None:
    rows = [{"id": "a", "question": "?", "answer": "7"}, {"id": "a", "question": "?", "answer": "8"}]
    rows.append({"question": "?", "answer": "9"})
    assert [row.sample_id for row in read_split(write_rows(folder, *rows)).rows] == ["a", "train-3"]
    numbered = read_split(folder, repeated_ids="number")
    assert [row.sample_id for row in numbered.rows] == ["a-1", "a-2", "train-3"] and numbered.skipped == ()


def test_a_fingerprint_changes_with_any_content_that_is_read(folder: Path) -> None:
    file = folder / "train.jsonl"
    file.write_text("a" * 1000)
    first = fingerprint_of([file])
    assert first == fingerprint_of([file]) != fingerprint_of([file, file])
    file.write_text("b" * 1000)
    assert fingerprint_of([file]) != first
    file.write_bytes(bytes(4 << 20))
    large = fingerprint_of([file])
    file.write_bytes(bytes((4 << 20) - 1) + b"x")
    assert fingerprint_of([file]) != large


def test_links_of_the_hubs_cache_are_read_and_other_links_are_not(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "datasets--lab--x" / "snapshots" / "0a1b", tmp_path / "datasets--lab--x" / "blobs"
    (snapshot / "images").mkdir(parents=True)
    blobs.mkdir()
    Image.new("RGB", (56, 56)).save(blobs / "hash", format="PNG")
    Image.new("RGB", (56, 56)).save(tmp_path / "secret.png")
    (snapshot / "images" / "0.png").symlink_to("../../../blobs/hash")
    (snapshot / "secret.png").symlink_to("../../../secret.png")
    (snapshot / "refs.png").symlink_to("../../blobs/../../secret.png")
    names = ["images/0.png", "secret.png", "refs.png", "../../blobs/hash", str(blobs / "hash")]
    rows = [{"question": "<image>?", "answer": "7", "image": name} for name in names]
    split = read_split(write_rows(snapshot, *rows))
    assert [row.images for row in split.rows] == [(snapshot.resolve() / "images" / "0.png",)]
    assert [skipped.reason for skipped in split.skipped] == ["outside_folder"] * 4
    assert len(conversation_rows(snapshot, {"messages": [TURN, ANSWER], "image": "images/0.png"})) == 1
