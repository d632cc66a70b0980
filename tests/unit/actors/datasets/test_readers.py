"""Readers of file formats: one order, one access to records, one reason for each unusable record."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import data_config, encoded, read_split
from PIL import Image

from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.readers import READERS
from mobula.actors.datasets.rows import RowError, Split, count_by_reason
from mobula.cluster.errors import DatasetError
from mobula.configs.load import load_config
from mobula.configs.schema.data import DataKind

NUM = 50
ROWS: list[dict[str, Any]] = [
    {"id": f"r{n}", "question": f'What is {n} + 1, "[{{}}]\\?', "answer": str(n + 1), "level": n % 3}
    for n in range(NUM)
]


def write_jsonl(folder: Path) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_json(folder: Path) -> None:
    (folder / "train.json").write_text(json.dumps(ROWS, indent=2))


def write_parquet(folder: Path) -> None:
    """Two files, in the layout of the hub, of several row groups."""
    for part, rows in enumerate((ROWS[:30], ROWS[30:])):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"train-{part:05}-of-00002.parquet", row_group_size=7)


def write_webdataset(folder: Path) -> None:
    for shard, rows in enumerate((ROWS[:30], ROWS[30:])):
        with tarfile.open(folder / f"train-{shard:04}.tar", "w") as tar:
            for row in rows:
                add(tar, f"./part/{row['id']}.json", json.dumps(row).encode())


def write_huggingface(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(folder))


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


WRITERS: dict[str, Callable[[Path], None]] = {
    "jsonl": write_jsonl,
    "prompts": write_jsonl,
    "json": write_json,
    "parquet": write_parquet,
    "huggingface": write_huggingface,
    "webdataset": write_webdataset,
}


def test_every_kind_of_the_configuration_has_a_reader() -> None:
    read_otherwise = (DataKind.MIXTURE, DataKind.CHAT, DataKind.ENVIRONMENT)
    assert list(READERS) == [kind.value for kind in DataKind if kind not in read_otherwise]


@pytest.mark.parametrize("kind", READERS)
def test_every_reader_gives_the_rows_in_order_and_by_place(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path)
    rows = read_split(tmp_path, "train", kind).rows
    assert [(row.sample_id, row.question, row.answer) for row in rows] == [
        (row["id"], row["question"], row["answer"]) for row in ROWS
    ]
    assert [row.metadata for row in rows] == [{"level": row["level"]} for row in ROWS]
    opened = open_split(data_config(tmp_path, kind), "train", "label").rows
    assert [opened[place].sample_id for place in (41, 3, 29, 30)] == ["r41", "r3", "r29", "r30"]


def test_a_text_file_is_a_list_of_prompts(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbfa sign that says "71"\r\n\r\n  a {red} cube\n\xff\xfe\nein Stra\xc3\x9fenschild'
    (tmp_path / "train.txt").write_bytes(lines)
    config = load_config(["experiment=sd3_5_ocr_grpo", f"data.path={tmp_path}"]).data
    rows = open_split(config, "train", "label").rows
    assert [(rows[n].question, rows[n].answer, rows.name(n)) for n in (0, 1, 3)] == [
        ('a sign that says "71"',) * 2 + ("train.txt:1",),
        ("a {red} cube",) * 2 + ("train.txt:3",),
        ("ein Straßenschild",) * 2 + ("train.txt:5",),
    ]
    with pytest.raises(RowError, match="the line is not UTF-8"):
        rows[2]
    (tmp_path / "train.jsonl").write_text('{"prompt": "from JSON"}')
    assert open_split(config, "train", "label").rows[0].question == "from JSON"


def test_a_large_row_group_is_copied_and_gives_the_same_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    plain = read_split(tmp_path, "train", "parquet")
    assert not (tmp_path / "cache").exists()
    copied = read_split(tmp_path, "train", "parquet", shuffle_bytes=100)
    assert copied.rows == plain.rows
    [copy] = (tmp_path / "cache").glob("*.arrow")
    written = copy.stat().st_mtime_ns
    assert read_split(tmp_path, "train", "parquet", shuffle_bytes=100).rows == plain.rows
    assert copy.stat().st_mtime_ns == written, "the copy is used again"


def test_rows_without_ids_are_named_by_file_and_place_in_every_part(tmp_path: Path) -> None:
    for part in range(2):
        rows = [{"question": "q", "answer": "a", "extra": {"a": 1} if part else {"b": 2}}] * 2
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"train-{part}.parquet")
    split = read_split(tmp_path, "train", "parquet")
    assert [row.sample_id for row in split.rows] == ["train-0-1", "train-0-2", "train-1-1", "train-1-2"]
    assert [row.metadata for row in split.rows[::2]] == [{"extra": {"b": 2}}, {"extra": {"a": 1}}]


def test_values_that_json_does_not_have_become_text_and_files_are_no_metadata(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "answer": 7.5,
        "day": date(2026, 1, 2),
        "file": b"x",
        "nested": {"file": b"x", "none": None},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    [found] = read_split(tmp_path, "train", "parquet").rows
    assert found.answer == "7.5"
    assert json.loads(json.dumps(found.metadata)) == {"day": "2026-01-02", "nested": {}}


def test_a_sample_of_a_shard_has_the_images_beside_it(tmp_path: Path) -> None:
    images = [encoded(Image.new("L", (4, 4), colour)) for colour in (0, 255)]
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        add(tar, "s1.0.png", images[0])
        add(tar, "s1.1.png", images[1])
        add(tar, "s1.json", b'{"question": "<image><image>Which?", "answer": 7.50}')
        add(tar, "s2.txt", b"Say 3.")
        add(tar, "s2.answer", b"3")
        add(tar, "s3.json", b'{"question": ')
        add(tar, "s4.json", b'{"question": "<audio><audio>?", "answer": "a"}')
        add(tar, "s4.0.wav", b"sound")
        add(tar, "s4.1.flac", b"other")
    split = read_split(tmp_path, "train", "webdataset", columns={"question": "txt"})
    assert [(row.question, row.answer) for row in split.rows] == [
        ("<image><image>Which?", "7.50"), ("Say 3.", "3"), ("<audio><audio>?", "a"),
    ]  # fmt: skip
    assert [image.content for image in split.rows[0].images] == images
    assert [sound.content for sound in split.rows[2].audios] == [b"sound", b"other"]
    assert count_by_reason(split.skipped) == {"broken_json": 1}
    assert [skipped.sample for skipped in split.skipped] == ["train.tar:3"]


def test_a_sample_of_a_shard_has_the_videos_beside_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        add(tar, "s1.json", b'{"question": "<video><image>Which? <video>", "answer": 7}')
        add(tar, "s1.0.MP4", b"first")
        add(tar, "s1.1.video.gif", b"second")
        add(tar, "s1.2.gif", b"image")
    [row] = read_split(tmp_path, "train", "webdataset").rows
    assert [video.content for video in row.videos] == [b"first", b"second"]
    assert [image.content for image in row.images] == [b"image"]


def test_a_compressed_shard_is_refused_by_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train.tar", "w:gz") as tar:
        add(tar, "s1.json", b"{}")
    with pytest.raises(DatasetError, match=r"train\.tar is compressed with gzip: unpack it"):
        read_split(tmp_path, "train", "webdataset")


@pytest.mark.parametrize("num_bytes", [512, 700, 1024, 1100, 1536])
def test_a_shard_that_was_cut_is_refused_by_name(tmp_path: Path, num_bytes: int) -> None:
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        add(tar, "s1.json", b'{"question": "q", "answer": 7}')
        add(tar, "s2.json", b'{"question": "q", "answer": 8}')
    assert len(read_split(tmp_path, "train", "webdataset").rows) == 2
    (tmp_path / "train.tar").write_bytes((tmp_path / "train.tar").read_bytes()[:num_bytes])
    with pytest.raises(DatasetError, match=r"train\.tar is no uncompressed tar file \(unexpected end of data\)"):
        read_split(tmp_path, "train", "webdataset")


def test_a_text_member_of_a_shard_has_no_mark_and_no_end_of_line(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        add(tar, "s1.question", b"\xef\xbb\xbfSay\r\n3.\r\n")
        add(tar, "s1.answer", b"3\n")
    [row] = read_split(tmp_path, "train", "webdataset").rows
    assert (row.question, row.answer) == ("Say\r\n3.", "3")


@pytest.mark.parametrize(
    ("name", "option", "what"),
    [
        ("train.jsonl.gz", "jsonl", "is compressed"),
        ("train.json.zst", "json", "is compressed"),
        ("train-0000.tar.gz", "webdataset", "is compressed"),
        ("data/train.jsonl.bz2", "jsonl", "is compressed"),
        ("train.csv", "jsonl", "data.kind=huggingface"),
        ("train.tsv", "parquet", "data.kind=huggingface"),
    ],
)
def test_files_that_are_there_in_another_form_are_named(tmp_path: Path, name: str, option: str, what: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DatasetError, match=f"{name}.*{what}"):
        read_split(tmp_path, "train", option)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("[]", []),
        (' [ {"id": "a", "question": "],{[", "answer": 1} , {"id":"b","question":"q\\"","answer":[]} ] ', ["a"]),
        ('{"id": "a", "question": "q", "answer": 1}\n{"id": "b", "question": "q", "answer": 1}\n', ["a", "b"]),
    ],
)
def test_a_json_file_is_an_array_or_lines(tmp_path: Path, text: str, ids: list[str]) -> None:
    (tmp_path / "train.json").write_text(text)
    if not ids:
        with pytest.raises(DatasetError, match=r"train\.json has no usable row"):
            read_split(tmp_path, "train", "json")
        return
    assert [row.sample_id for row in read_split(tmp_path, "train", "json").rows] == ids


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json", json.dumps(ROWS)[:-1], "an array that does not end"),
        *[
            ("json", f"{json.dumps(ROWS)}\n{behind}\n", r"train\.json goes on behind its array")
            for behind in ("[]", '[{"question": "q", "answer": 1}]', "x", ",")
        ],
        ("jsonl", json.dumps(ROWS), "the line is a JSON list: .* data.kind=json"),
        ("parquet", "PAR1 and no more", "Parquet files of .* cannot be read"),
    ],
)
def test_a_file_that_is_not_of_its_kind_is_an_error(tmp_path: Path, kind: str, text: str, message: str) -> None:
    (tmp_path / f"train.{kind}").write_text(text)
    with pytest.raises(DatasetError, match=message):
        read_split(tmp_path, "train", kind)


@pytest.mark.parametrize("max_block_bytes", [1 << 20, 1])
def test_parquet_of_spark_has_maps_and_short_floats(tmp_path: Path, max_block_bytes: int) -> None:
    as_map = pa.map_(pa.string(), pa.string())
    columns = {
        "prompt": pa.array([[{"role": "user", "content": "q"}]] * 2),
        "reward_model": pa.array([[("ground_truth", "3")], [("ground_truth", "3"), ("ground_truth", "4")]], as_map),
        "extra_info": pa.array([[("index", "0")]] * 2, as_map),
        "level": pa.array([0.1, 0.1], pa.float32()),
        "scores": pa.array([{"half": 0.1}] * 2, pa.struct({"half": pa.float16()})),
    }
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    split = read_split(tmp_path, "train", "parquet", row_format="verl", shuffle_bytes=max_block_bytes)
    [row] = split.rows
    assert (row.question, row.answer) == ("q", "3")
    assert row.metadata == {"level": 0.1, "scores": {"half": 0.1}, "index": "0"}
    assert count_by_reason(split.skipped) == {"repeated_key": 1}


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["q"]), pa.array(["7"]), pa.array(["8"])], ["question", "answer", "answer"])
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DatasetError, match="train.parquet has two columns answer"):
        read_split(tmp_path, "train", "parquet")


def test_a_split_may_be_called_otherwise_in_the_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    for name in ("train", "tr*.jsonl", "train.jsonl"):
        assert len(read_split(tmp_path, "validation", splits={"validation": name}).rows) == NUM
    with pytest.raises(DatasetError, match=r"valid\.jsonl does not exist: set data\.path"):
        read_split(tmp_path, "validation", splits={"validation": "valid"})


def test_a_file_in_the_place_of_the_folder_names_the_key_to_set(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    config = data_config(tmp_path, path=tmp_path / "train.jsonl")
    with pytest.raises(DatasetError, match=r"is a file: name its folder, .*data\.splits=\{train: train\.jsonl\}"):
        open_split(config, "train", "label")


def test_a_stream_is_cut_and_kept(tmp_path: Path, datasets: Any) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data")
    config = data_config(
        tmp_path / "data", "huggingface", "data.huggingface.streamed_rows=20", cache_path=tmp_path / "cache"
    )
    for _ in range(2):
        rows = open_split(config, "train", "label").rows
        assert [row.sample_id for row in rows] == [f"r{n}" for n in range(20)]
        (tmp_path / "data" / "train.jsonl").unlink(missing_ok=True)  # the second time it is read from the cache


def write_media(folder: Path, columns: dict[str, Any], record: dict[str, Any], *, is_hub: bool) -> None:
    """A data set of one record with columns of media, written without the libraries that encode them."""
    datasets = pytest.importorskip("datasets")
    stored = pa.Table.from_pylist([record], schema=datasets.Features(columns).arrow_schema)
    if is_hub:
        folder.mkdir()
        pq.write_table(stored, folder / "train.parquet")
    else:
        split = datasets.Dataset(datasets.table.InMemoryTable(stored))
        datasets.DatasetDict({"train": split}).save_to_disk(str(folder))


@pytest.mark.parametrize("is_hub", [False, True])
@pytest.mark.parametrize("kind", ["Image", "Audio", "Video"])
@pytest.mark.parametrize("num", [0, 2])
def test_media_columns_of_a_hugging_face_dataset_stay_files(
    tmp_path: Path, kind: str, num: int, is_hub: bool, datasets: Any
) -> None:
    medium, value = getattr(datasets, kind)(), {"bytes": b"content", "path": None}
    column = {"Image": "images", "Audio": "audios", "Video": "videos"}[kind]
    columns = {
        "question": datasets.Value("string"),
        "answer": datasets.Value("string"),
        column: datasets.List(medium) if num else medium,
    }
    record = {"question": f"<{column[:-1]}>" * (num or 1), "answer": "7", column: [value] * num if num else value}
    write_media(tmp_path / "d", columns, record, is_hub=is_hub)
    for streamed in (0, 1) if is_hub else (0,):
        [row] = read_split(tmp_path / "d", "train", "huggingface", f"data.huggingface.streamed_rows={streamed}").rows
        assert [medium.content for medium in getattr(row, column)] == [b"content"] * (num or 1)


def test_media_in_the_messages_of_a_hugging_face_dataset_stay_files(tmp_path: Path, datasets: Any) -> None:
    text = datasets.Value("string")
    part = {"type": text, "text": text, "image": datasets.Image(), "audio": datasets.Audio()}
    columns = {"messages": datasets.List({"role": text, "content": datasets.List(part)}), "answer": text}
    empty = dict.fromkeys(part)
    content = [
        {**empty, "type": "image", "image": {"bytes": b"image", "path": None}},
        {**empty, "type": "audio", "audio": {"bytes": b"sound", "path": None}},
        {**empty, "type": "text", "text": "?"},
    ]
    write_media(
        tmp_path / "d", columns, {"messages": [{"role": "user", "content": content}], "answer": "7"}, is_hub=False
    )
    [row] = read_split(tmp_path / "d", "train", "huggingface", row_format="messages").rows
    assert (row.question, row.images[0].content, row.audios[0].content) == ("<image><audio>?", b"image", b"sound")


@pytest.mark.parametrize("streamed", [0, 1])
def test_a_dataset_of_several_configurations_gives_the_one_that_is_named(
    tmp_path: Path, streamed: int, datasets: Any
) -> None:
    listed = []
    for name in ("easy", "hard"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "train.jsonl").write_text(json.dumps({"question": name, "answer": "7"}))
        listed.append(f"- config_name: {name}\n  data_files: {name}/train.jsonl\n")
    (tmp_path / "d" / "README.md").write_text(f"---\nconfigs:\n{''.join(listed)}---\n")
    for name in ("easy", "hard"):
        named = (f"data.huggingface.subset={name}", f"data.huggingface.streamed_rows={streamed}")
        split = read_split(tmp_path / "d", "train", "huggingface", *named)
        assert [row.question for row in split.rows] == [name]
    with pytest.raises(DatasetError, match="Config name is missing"):
        read_split(tmp_path / "d", "train", "huggingface", f"data.huggingface.streamed_rows={streamed}")


@pytest.mark.parametrize("word", ["data.huggingface.subset=hard", "data.huggingface.streamed_rows=5"])
def test_a_saved_folder_refuses_what_is_for_the_hub(tmp_path: Path, word: str) -> None:
    write_huggingface(tmp_path / "d")
    with pytest.raises(DatasetError, match=f"a folder of save_to_disk .*{word.partition('=')[0]}"):
        read_split(tmp_path / "d", "train", "huggingface", word)


def test_a_dataset_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "d")
    with pytest.raises(DatasetError, match=r"has no split nowhere that datasets can load"):
        read_split(tmp_path / "d", "nowhere", "huggingface")


def test_values_of_csv_files_are_texts(tmp_path: Path, datasets: Any) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.csv").write_text("question,answer,level\n2 + 5?,007,2\n2 + 6?,,3\n")
    split = read_split(tmp_path / "d", "train", "huggingface")
    assert [(row.question, row.answer, row.metadata) for row in split.rows] == [("2 + 5?", "007", {"level": "2"})]
    assert count_by_reason(split.skipped) == {"missing_answer": 1}


def test_images_of_an_image_folder_are_read(tmp_path: Path, datasets: Any) -> None:
    folder = tmp_path / "d" / "train"
    folder.mkdir(parents=True)
    Image.new("RGB", (56, 56)).save(folder / "x.png")
    (folder / "metadata.jsonl").write_text('{"file_name": "x.png", "question": "<image>?", "answer": "7"}\n')
    [row] = read_split(tmp_path / "d", "train", "huggingface").rows
    assert row.images == ((folder / "x.png").resolve(),)


def test_a_cache_of_datasets_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("/proc/nowhere"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.jsonl").write_text("")
    with pytest.raises(DatasetError, match="/proc/nowhere, cannot be written .* set HF_HOME"):
        read_split(tmp_path / "d", "train", "huggingface")


# Reading MAYE's JSONL schema: what is kept, and how everything that cannot be used is named.

GOOD: dict[str, Any] = {
    "id": "good",
    "question": "<image>Which?",
    "answer": "7",
    "solution": r"\boxed{7}",
    "image": "a.png",
}


def read(folder: Path, *lines: dict[str, Any] | str | bytes) -> Split:
    """The split of these lines, with two image files beside it; reading does not look into them."""
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(b"image")
    encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    content = b"\n".join(line.encode() if isinstance(line, str) else line for line in encoded)
    (folder / "train.jsonl").write_bytes(content + b"\n")
    return read_split(folder, "train")


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in GOOD.items() if k != key} | ({} if key == "id" else {"id": "bad"})


def test_a_row_without_id_and_solution_gets_its_line_and_a_boxed_answer(tmp_path: Path) -> None:
    rows = read(tmp_path, GOOD, "", {"question": "q", "answer": "7"}, {"id": 3, "question": "q", "answer": "7"}).rows
    assert [row.sample_id for row in rows] == ["good", "train-3", "3"]
    assert rows[1].solution == r"\boxed{7}"


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
        (GOOD | {"id": "bad", "image": "absent.png"}, "missing_file"),
        (without("image"), "placeholder_mismatch"),
        (GOOD | {"id": "bad", "image": ["a.png", "b.png"]}, "placeholder_mismatch"),
        (GOOD | {"id": "bad", "question": "Which?"}, "placeholder_mismatch"),
    ],
)
def test_an_unusable_line_is_skipped_counted_and_named(tmp_path: Path, line: Any, reason: str) -> None:
    split = read(tmp_path, GOOD, line, GOOD | {"id": "after"})
    assert [row.sample_id for row in split.rows] == ["good", "after"]
    assert count_by_reason(split.skipped) == {reason: 1}
    assert split.skipped[0].sample.startswith("train.jsonl:2")
    assert split.skipped[0].detail


def test_a_dataset_of_unusable_rows_is_an_error_that_names_the_first_few(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"train.jsonl:1 \(bad\).*`answer`.*; \.\.\.\)"):
        read(tmp_path, *[without("answer")] * 4)


def test_what_the_schema_does_not_name_travels_as_metadata(tmp_path: Path) -> None:
    row = {"question": "2+2?", "answer": "4", "label": "sum", "limit": 7.50, "metadata": {"limit": 3, "tags": ["a"]}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "metadata": [1]}))
    split = read_split(tmp_path, "train")
    assert split.rows[0].metadata == {"label": "sum", "limit": 3, "tags": ["a"]}
    assert [skipped.reason for skipped in split.skipped] == ["bad_metadata"]
