"""What can be scored: JSONL in stretches with broken lines among them, Parquet, and a run's trajectories."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import make_group, make_scored
from group_data import picture_prompt
from score_data import answer, options, record, write_jsonl

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.rewards.offline.evaluation import BrokenSourceError, evaluate
from mobula.rewards.offline.partial import Partial
from mobula.rewards.offline.rules.schemes import built_in_schemes
from mobula.rewards.offline.scoring import SchemeScorer
from mobula.rewards.offline.sources import columnar, jsonl
from mobula.rewards.offline.sources.jsonl import Batch, stretches
from mobula.rewards.offline.sources.records import Record
from mobula.rewards.offline.sources.source import Source, open_source


def read(source: Source, *, with_metadata: bool = False) -> list[Record]:
    return [r for part in source.parts for batch in part.batches(with_metadata=with_metadata) for r in batch.records]


def run(source: Source, **changes: Any) -> Partial:
    chosen = options()
    scorer = SchemeScorer(built_in_schemes(chosen), chosen, compared=(1, 0), writes_rows=False)
    return evaluate(source, scorer, chosen, num_processes=1, timeout_s=60, **changes)


@pytest.mark.parametrize("num_bytes", [1, 7, 64, 1000, 1 << 20])
def test_every_line_is_read_once_however_the_file_is_cut(tmp_path: Path, num_bytes: int) -> None:
    rows = [record(str(i), "x" * (i % 50), "x") for i in range(40)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    found = [b for stretch in stretches(path, num_bytes) for b in stretch.batches(with_metadata=False)]
    assert [r.id for batch in found for r in batch.records] == [str(i) for i in range(40)]
    assert sum(batch.num_lines for batch in found) == 40


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON"),
        ("[1]", "a list, not an object"),
        ('{"id": "a"}', "it has no response"),
        ('{"response": null}', "it has no response"),
        ('{"response": "x", "metadata": {"latency_ms": "soon"}}', "metadata.latency_ms is 'soon', no number"),
        ('{"response": "x", "metadata": {"latency_ms": Infinity}}', "metadata.latency_ms is inf, not finite"),
        ('{"response": NaN}', "it has no response"),
        ('{"response": "x", "metadata": [1]}', "metadata is a list, not an object"),
        ('{"response": "x", "reference": {"a": 1}}', "reference is an object"),
        ('{"response": "x", "reference": ["x", {"a": 1}]}', "reference has an object, not a text"),
        ('{"response": "x", "metadata": {"claimed_entities": [["x"]]}}', "claimed_entities has a list, not a text"),
        ('{"response": ["x"], "reference": "x"}', "response is a list, not a text"),
        (
            '{"response": "x", "prompt": {"text": "x"}}',
            "prompt is an object, neither a text nor a list of chat messages",
        ),
        ('{"response": {"answer": "x"}, "reference": "x"}', "response is an object, not a text"),
        ('{"response": true, "reference": "True"}', "response is true, not a text"),
        ("[" * 100_000, "no JSON"),
        ('{"response": "x", "response": "y"}', "the key 'response' stands twice"),
        ('{"response": "x", "reference": "x", "reference": "y"}', "the key 'reference' stands twice"),
        ("\\xff", "no JSON"),
    ],
)
def test_a_broken_line_is_skipped_counted_and_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(record("good", "x", "x")).encode()
    path.write_bytes(good + b"\n\n" + line.encode().replace(b"\\xff", b"\xff") + b"\n" + good)
    whole = run(open_source(path))
    assert (whole.num_records, whole.num_broken) == (2, 1)
    [(number, message)] = whole.broken
    assert number == 3
    assert reason in message
    with pytest.raises(BrokenSourceError, match="line 3"):
        run(open_source(path), is_strict=True)


def test_many_broken_lines_are_all_counted_and_the_first_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("nothing\n" * 100_000)
    whole = run(open_source(path))
    assert whole.num_broken == 100_000
    assert [line for line, _ in whole.broken] == list(range(1, 21))


def test_numbers_stand_for_texts_and_one_text_for_a_list(tmp_path: Path) -> None:
    row = {"id": 7, "response": 14, "reference": [14, "14.0"], "metadata": {"claimed_entities": "14"}}
    [found] = read(open_source(write_jsonl(tmp_path / "rows.jsonl", [row])))
    assert (found.id, found.response, found.references) == (7, "14", ("14", "14.0"))
    assert found.metadata.claimed_entities == ["14"]


def test_a_line_too_long_is_passed_over_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(jsonl, "_SKIP_BYTES", 64)
    rows = [record("a", "x", "x"), record("long", "y" * 5000, "x"), record("b", "x", "x")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    source = Source(path, "jsonl", "bytes", stretches(path, 256))
    assert [r.id for r in read(source)] == ["a", "b"]
    assert run(source).broken == [(2, "longer than 1,000 bytes")]


def test_memory_holds_one_batch_at_a_time_and_no_record_of_the_ones_before(tmp_path: Path) -> None:
    alive = 0
    most = 0

    class Part:
        size = 50

        def batches(self, *, with_metadata: bool) -> Iterator[Batch]:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            yield Batch([Record(answer("x"), id=f"r{i}", reference="y", prompt="p" * 100) for i in range(50)], 50)
            alive -= 1

    whole = run(Source(tmp_path, "made", "rows", [Part() for _ in range(40)]))
    assert whole.num_records == 2000
    assert most == 1
    kept = [example for results in whole.schemes for example in (*results.best, *results.worst)]
    assert len(kept) == 12
    assert all(len(examples) == 3 for examples in whole.disagreeing.values())


def test_a_batch_of_parquet_is_bounded_by_its_bytes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "BATCH_BYTES", 1 << 20)
    rows = [{"response": str(n), "image": {"bytes": os.urandom(100_000), "path": "a.png"}} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    [part] = open_source(tmp_path / "rows.parquet").parts
    sizes = [len(batch.records) for batch in part.batches(with_metadata=True)]
    assert sum(sizes) == 40 and max(sizes) in (9, 10)
    assert [len(batch.records) for batch in part.batches(with_metadata=False)] == [40], "the pictures are not read"


@pytest.mark.parametrize("is_struct", [True, False])
def test_parquet_scores_as_the_same_records_in_jsonl(tmp_path: Path, is_struct: bool) -> None:
    rows = [record(f"r{i}", answer("red"), ["red", "crimson"], ["red"], ["red"], latency_ms=i) for i in range(10)]
    values = rows if is_struct else [{**row, "metadata": json.dumps(row["metadata"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "rows.parquet", row_group_size=4)
    source = open_source(tmp_path / "rows.parquet")
    assert [part.size for part in source.parts] == [4, 4, 2]
    assert read(source) == read(open_source(write_jsonl(tmp_path / "rows.jsonl", rows)))


def test_a_large_row_group_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "BATCH_ROWS", 16)
    pq.write_table(pa.table({"response": ["x"] * 50 + [None]}), tmp_path / "rows.parquet")
    [part] = open_source(tmp_path / "rows.parquet").parts
    found = list(part.batches(with_metadata=False))
    assert [len(batch.records) for batch in found] == [16, 16, 16, 2]
    assert found[-1].broken == [(3, "it has no response")]


def test_a_row_of_recorded_trajectories_whose_metadata_is_broken_is_skipped_and_named(tmp_path: Path) -> None:
    columns = {"response_text": ["x"] * 4, "references": [["x"]] * 4, "response_num_tokens": [1, 2, 3, 4]}
    table = pa.table({**columns, "metadata": ["{broken", None, "[1]", '{"latency_ms": 7}']})
    pq.write_table(table, tmp_path / "step-1.parquet")
    whole = run(open_source(tmp_path / "step-1.parquet"))
    assert (whole.num_records, whole.num_broken) == (2, 2)
    assert [line for line, _ in whole.broken] == [1, 3]
    assert whole.broken[1][1] == "metadata is a list, not an object"


def test_what_was_cut_or_changed_after_it_was_opened_is_refused_by_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [record("a", "x", "x")])
    source = open_source(path)
    path.unlink()
    with pytest.raises(BrokenSourceError, match=r"bytes 0 to .* of .*rows.jsonl cannot be read"):
        run(source)


def test_the_trajectories_of_a_run(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path / "trajectories", timeout_s=1)
    group = make_group(picture_prompt())
    log.append(2, [ScoredGroup(group.summary(), group, (Reward(1.0),) * len(group.trajectories))])
    log.append(10, [make_scored("0/1/b")])
    for folder in (tmp_path, tmp_path / "trajectories"):
        found = read(open_source(folder), with_metadata=True)
        first, trajectory = found[0], group.trajectories[0]
        assert first.id == trajectory.trajectory_id
        assert first.response == trajectory.response.text
        assert first.prompt == group.prompt.text
        assert first.references == group.prompt.references
        assert first.metadata.generated_tokens == trajectory.response.num_tokens
        assert first.everything.metadata["is_truncated"] == trajectory.response.is_truncated
        assert first.everything.pictures == ("images/3.png",)
        assert found[-1].id == "0/1/b#1"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("none.jsonl", "No such file"),
        ("none.parquet", "No such file"),
        ("bad.parquet", "no Parquet"),
        (".", "no recorded"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "bad.parquet").write_text("hello")
    with pytest.raises(PreflightError, match=what):
        open_source(tmp_path / name)


def test_a_pipe_is_refused_and_not_taken_for_an_empty_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PreflightError, match="pipe is a pipe or a device"):
        open_source(tmp_path / "pipe")


def test_parquet_without_responses_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "rows.parquet")
    with pytest.raises(PreflightError, match="no column `response`, only text"):
        open_source(tmp_path / "rows.parquet")


def test_a_prompt_of_chat_messages_is_their_text(tmp_path: Path) -> None:
    picture = {"type": "image", "image": "a.png"}
    asked = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [picture, {"type": "text", "text": "Which digit?"}]},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"prompt": asked, "response": "7", "reference": "7"}))
    [found] = read(open_source(path))
    assert found.prompt == "Be short.\nWhich digit?"
