"""What can be scored: JSONL with broken rows among the others, Parquet, and a run's trajectories."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import make_group, make_scored
from group_data import image_prompt
from score_data import AERORL, answer, options, record, score_file, write_jsonl

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.rewards.offline import rows as sources
from mobula.rewards.offline.rows import Batch, Record, Source, open_source, read_row
from mobula.rewards.offline.scorer import RecordScorer, ScoredBatch


def read(path: Path, *, needs_images: bool = False) -> list[Record]:
    source = open_source(path, needs_images=needs_images)
    return [read_row(row) for batch in source.batches(lambda: 3) for row in batch.rows]


def scored(path: Path) -> ScoredBatch:
    """All of a file as one batch."""
    [batch] = open_source(path, needs_images=False).batches(lambda: 1 << 20)
    return RecordScorer(options(AERORL, path.parent)).score(batch)


@pytest.mark.parametrize("num_rows", [1, 7, 1000])
def test_every_line_is_read_once_however_large_the_batches_are(tmp_path: Path, num_rows: int) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [record(str(i), "x" * (i % 50), "x") for i in range(40)])
    source = open_source(path, needs_images=False)
    batches = list(source.batches(lambda: num_rows))
    assert [read_row(row).id for batch in batches for row in batch.rows] == [str(i) for i in range(40)]
    assert [batch.first for batch in batches] == list(range(1, 41, num_rows))
    assert sum(batch.size for batch in batches) == source.size == path.stat().st_size


def test_a_batch_is_bounded_by_its_bytes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 1 << 20)
    rows = [{"response": str(n), "image": {"bytes": os.urandom(100_000), "path": "a.png"}} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    sizes = [len(b.rows) for b in open_source(tmp_path / "rows.parquet", needs_images=True).batches(lambda: 1000)]
    assert sum(sizes) == 40 and max(sizes) in (9, 10)
    lines = write_jsonl(tmp_path / "rows.jsonl", [record("a", "x" * 400_000, "x"), *[record("b", "x", "x")] * 3])
    source: Source = open_source(lines, needs_images=False)
    assert [len(batch.rows) for batch in source.batches(lambda: 1000)] == [4]
    monkeypatch.setattr(sources, "BATCH_BYTES", 1 << 10)
    assert [len(batch.rows) for batch in source.batches(lambda: 1000)] == [1, 3]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "no JSON"),
        ("[1]", "a list, not an object"),
        ('{"id": "a"}', "it has no response"),
        ('{"response": null}', "it has no response"),
        ('{"response": NaN}', "it has no response"),
        ('{"response": "x", "metadata": [1]}', "metadata is a list, not an object"),
        ('{"response": "x", "metadata": "{broken"}', "metadata is a text and no JSON"),
        ('{"response": "x", "metadata": {"generated_tokens": "many"}}', "generated_tokens is 'many', no number"),
        ('{"response": "x", "reference": {"a": 1}}', "reference is an object"),
        ('{"response": "x", "reference": ["x", {"a": 1}]}', "reference is an object, not a text"),
        ('{"response": ["x"], "reference": "x"}', "response is a list, not a text"),
        ('{"response": "x", "prompt": {"text": "x"}}', "prompt is an object, not a text"),
        ('{"response": {"answer": "x"}, "reference": "x"}', "response is an object, not a text"),
        ('{"response": true, "reference": "True"}', "response is true, not a text"),
        ("[" * 100_000, "no JSON"),
        ('{"response": "x", "response": "y"}', "the key 'response' stands twice"),
        ('{"response": "x", "reference": "x", "reference": "y"}', "the key 'reference' stands twice"),
        ("\\xff", "no JSON"),
    ],
)
def test_a_broken_row_is_skipped_counted_and_named(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(record("good", "x", "x")).encode()
    path.write_bytes(good + b"\n\n" + line.encode().replace(b"\\xff", b"\xff") + b"\n" + good)
    summary = scored(path).summary
    assert (summary.num_records, summary.num_broken) == (2, 1)
    [(number, message)] = summary.broken
    assert number == 3
    assert fault in message


def test_many_broken_rows_are_all_counted_and_the_first_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("nothing\n" * 10_000)
    report = score_file(tmp_path / "rows.jsonl", AERORL)
    assert report["num_broken"] == 10_000
    assert [row["row"] for row in report["broken"]] == list(range(1, 21))


def test_numbers_stand_for_texts_and_one_text_for_a_list(tmp_path: Path) -> None:
    row = {"id": 7, "response": 14, "reference": [14, None, "14.0", " "]}
    [found] = read(write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert (found.id, found.text, found.references) == (7, "14", ("14", "14.0"))


@pytest.mark.parametrize("is_struct", [True, False])
def test_parquet_reads_as_the_same_records_in_jsonl(tmp_path: Path, is_struct: bool) -> None:
    rows = [record(f"r{i}", answer("red"), ["red", "crimson"], ["red"], ["red"], latency_ms=i) for i in range(10)]
    values = rows if is_struct else [{**row, "metadata": json.dumps(row["metadata"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "rows.parquet", row_group_size=4)
    assert read(tmp_path / "rows.parquet") == read(write_jsonl(tmp_path / "rows.jsonl", rows))


def test_a_row_of_recorded_trajectories_whose_metadata_is_broken_is_skipped_and_named(tmp_path: Path) -> None:
    columns = {"response_text": ["x"] * 4, "references": [["x"]] * 4, "response_num_tokens": [1, 2, 3, 4]}
    table = pa.table({**columns, "metadata": ["{broken", None, "[1]", '{"latency_ms": 7}']})
    pq.write_table(table, tmp_path / "step-1.parquet")
    summary = scored(tmp_path / "step-1.parquet").summary
    assert (summary.num_records, summary.num_broken) == (2, 2)
    assert [row for row, _ in summary.broken] == [1, 3]
    assert summary.broken[1][1] == "metadata is a list, not an object"


def test_the_trajectories_of_a_run(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path / "trajectories", timeout_s=1)
    group = make_group(image_prompt())
    log.append(2, [ScoredGroup(group.summary(), group, (Reward(1.0),) * len(group.trajectories))])
    log.append(10, [make_scored("0/1/b")])
    for folder in (tmp_path, tmp_path / "trajectories"):
        found = read(folder, needs_images=True)
        first, trajectory = found[0], group.trajectories[0]
        assert first.id == trajectory.trajectory_id
        assert first.text == trajectory.response.text
        assert first.prompt == group.prompt.text
        assert first.references == group.prompt.references
        request = first.request(lambda named: tuple(name.encode() for name in named), needs_images=True)
        assert request.response.num_tokens == trajectory.response.num_tokens
        assert request.response.is_truncated == trajectory.response.is_truncated
        assert request.prompt_images == (b"images/3.png",)
        assert found[-1].id == "0/1/b#1"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("none.jsonl", "No such file"),
        ("none.parquet", "No such file"),
        ("bad.parquet", "no Parquet"),
        ("packed.jsonl", "compressed with gzip"),
        (".", "no recorded"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(tmp_path: Path, name: str, fault: str) -> None:
    (tmp_path / "bad.parquet").write_text("hello")
    (tmp_path / "packed.jsonl").write_bytes(b"\x1f\x8b")
    with pytest.raises(PreflightError, match=fault):
        open_source(tmp_path / name, needs_images=False)


def test_parquet_without_responses_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "rows.parquet")
    with pytest.raises(PreflightError, match="no column `response`, only text"):
        open_source(tmp_path / "rows.parquet", needs_images=False)


def test_a_prompt_of_chat_messages_is_their_text() -> None:
    image = {"type": "image", "image": "a.png"}
    asked: list[dict[str, Any]] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [image, {"type": "text", "text": "Which digit?"}]},
    ]
    found = read_row(json.dumps({"prompt": asked, "response": "7", "reference": "7"}).encode())
    assert found.prompt == "Be short.\nWhich digit?"


def test_a_batch_of_nothing_has_no_records(tmp_path: Path) -> None:
    assert RecordScorer(options(AERORL, tmp_path)).score(Batch(1, [b"\n", b" "], 3)).summary.num_records == 0
