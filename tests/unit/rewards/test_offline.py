"""Offline scoring: aeroRL's published rules, rows of every source, and no dependence on processes."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_data import AERORL, PUBLISHED, SIX_ROWS, TOOLS, answer, options, record, score_file, write_jsonl

from benchmarks.harness.corruption import corrupt
from benchmarks.raw.score_reference import score_records
from benchmarks.score_records import SETTINGS
from mobula.cluster.errors import PreflightError, RewardError
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.configs.load import load_config
from mobula.rewards.functions import build_function
from mobula.rewards.offline import rows as sources
from mobula.rewards.offline import scorer
from mobula.rewards.offline.rows import Batch, Record, Source, open_source, read_row
from mobula.rewards.offline.scorer import RecordScorer, ScoredBatch, ScoreSummary


def score(name: str, row: dict[str, Any], **options: Any) -> float:
    """The value of one of the preset's components for a row."""
    request = read_row(row).request(lambda named: (), needs_images=False)
    return build_function(f"aerorl_{name}", options, TOOLS)(request)


@pytest.mark.parametrize(
    ("response", "reference", "published"),
    [
        ("stop", "Stop ", 1.0),
        ("dog", ["cat", "dog"], 1.0),
        (answer("stop"), "stop", 0.5),  # a bare reference is never equal to JSON
        *[(text, "cat", 0.5) for text in ("the category", "it is a cat.", answer("the cat"), '{"result": "cat"}')],
        *[(text, "cat", 0.5) for text in (f"```json\n{answer('cat')}\n```", r"\boxed{the cat}. Or \boxed{")],
        *[(text, "red", 0.5) for text in ("it is not red", "not blue but red", answer("wrong-red"), r"red \boxed{}")],
        *[(text, "14", 0.5) for text in ('{"answer": 14}', "3.14", "3/14", "page 14")],
        ("neither red nor blue", "blue", 0.5),
        ("the dog's", "s", 0.5),
        ('{"a": 1, "b": 2}', "1", 0.5),  # an object that names no answer has none
        ("答案是红色", "红", 0.5),  # no spaces between words
        *[(text, "14.0", -0.5) for text in (answer("14"), r"so it is \boxed{14}")],
        (answer("1,000"), "1000", -0.5),
        (answer("7%"), "0.07", -0.5),
        *[(text, "cat", -0.5) for text in ("dog", answer(""))],
    ],
)
def test_verifier(response: str, reference: Any, published: float) -> None:
    assert score("verifier", record("a", response, reference)) == published


@pytest.mark.parametrize("reference", [None, "", "  ", [], [" ", ""]])
def test_without_a_reference_the_verifier_gives_0(reference: Any) -> None:
    assert score("verifier", record("a", "", reference)) == score("contains", record("a", "", reference)) == 0.0


@pytest.mark.parametrize(
    ("claimed", "evidence", "published"),
    [
        *[([text], [text], 1.0) for text in ("cat", "?")],
        (["14"], ["page 14 of 2020"], 1.0),  # one number inside a text
        *[([claim], [given], 1.0) for claim, given in (("2014 dogs", "2014"), ("12%", "0.12"), ("12.50%", "0.125"))],
        *[([claim], ["dog"], 1.0) for claim in ("about the Dog", "The dog.")],
        (["?!"], ["..."], 1.0),  # what is left of both is nothing
        (["the next 2-3 weeks"], ["Within  the next 2-3 weeks."], 1.0),
        (["mother-in-law's?"], ["mother-in-law's"], 1.0),
        (["cat"], ["cat", "dog"], 1.0),  # recall 1/2: F1 2/3
        (["cat", "cat", "Cat", "fox"], ["cat"], 0.5),  # three true claims are one
        (["cat", "fox"], ["cat"], 0.0),
        *[(claimed, ["cat"], 0.0) for claimed in ([], None)],  # claims nothing, or claims are not given
        *[([claim], [given], -1.0) for claim, given in (("nike", "adidas"), ("1,000", "1000"), ("?!", "cat"))],
        *[([claim], [given], -1.0) for claim, given in (("-", "="), ("-5", "5"))],
        (["cat"], [], -1.0),
        ([], [], 0.0),
    ],
)
def test_grounding(claimed: Any, evidence: Any, published: float) -> None:
    assert score("grounding", record("a", "x", "y", evidence, claimed)) == pytest.approx(published)


def test_entities_that_are_no_texts_are_refused() -> None:
    with pytest.raises(RewardError, match="claimed_entities is .* no list of texts"):
        score("grounding", record("a", "x", "y", ["x"], [["x"]]))
    assert score("grounding", record("a", "x", "y", "14", [14, None])) == 1.0


@pytest.mark.parametrize(
    ("response", "published"),
    [
        (answer("x"), 1.0),
        ("answer: x", -0.8),
        ("[1]", 0.5),  # JSON and no object
        ('{"answer":\n"x"}', 0.5),  # '.' meets a newline
        ('{"answer": NaN}', 1.0),  # Python's JSON, not the standard's
        ("{" + "[" * 100_000, -0.8),
        ("", -0.8),
    ],
)
def test_format(response: str, published: float) -> None:
    options = {"require_json": True, "regex_pattern": r"^\{.*\}$"}
    assert score("format", record("a", response, "x"), **options) == published


@pytest.mark.parametrize(
    ("num_words", "metadata", "published"),
    [
        (10, {"latency_ms": 100}, 1.0),
        (11, {"latency_ms": 100}, 0.9),
        (15, {"latency_ms": 150}, 0.0),
        (1, {"latency_ms": 5000}, -1.0),
        (1, {}, 1.0),
        (1, {"generated_tokens": 12}, 1.0),  # what was generated, not what spaces part
    ],
)
def test_cost(num_words: int, metadata: dict[str, Any], published: float) -> None:
    row = record("a", " ".join(["w"] * num_words), "w", **metadata)
    assert score("cost", row, target_tokens=10, latency_budget_ms=100.0) == pytest.approx(published)


def test_a_latency_that_is_no_number_is_refused() -> None:
    with pytest.raises(RewardError, match="latency_ms='soon'"):
        score("cost", record("a", "x", "x", latency_ms="soon"), target_tokens=10, latency_budget_ms=100.0)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="regular expression"):
        build_function("aerorl_format", {"require_json": False, "regex_pattern": "("}, TOOLS)


def test_the_preset_has_the_published_weights_and_its_baseline_counts_nothing() -> None:
    rewards = load_config(["rewards=aerorl"], is_complete=False).rewards
    weights = {component.name: component.weight for component in rewards.components}
    assert weights == {"verifier": 0.4, "grounding": 0.3, "format": 0.2, "cost": 0.1, "contains": 0.0}


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
        ("rows.parquet", "no column `response`, only text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(tmp_path: Path, name: str, fault: str) -> None:
    (tmp_path / "bad.parquet").write_text("hello")
    (tmp_path / "packed.jsonl").write_bytes(b"\x1f\x8b")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "rows.parquet")
    with pytest.raises(PreflightError, match=fault):
        open_source(tmp_path / name, needs_images=False)


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


def test_the_published_report_of_six_rows(tmp_path: Path) -> None:
    report = score_file(write_jsonl(tmp_path / "six.jsonl", SIX_ROWS), PUBLISHED, writes_rows=True)
    accuracy = report["accuracy"]
    assert accuracy["share_right"] == 0.833333
    assert accuracy["right_below_threshold"] == ["format-bad-contains", "grounding-hidden"]
    assert accuracy["num_right_below_threshold"] / accuracy["num_right"] == 0.4
    assert round(report["pass_rate"] - accuracy["share_right"], 6) == -0.333333
    parts = ("verifier", "grounding", "format", "cost", "contains")
    worst = [(e["id"], e["reward"], *(e["components"][name] for name in parts)) for e in report["worst"]]
    assert worst == [
        ("format-bad-contains", 0.415, 0.5, 1.0, -0.8, 1.0, 1.0),
        ("grounding-hidden", 0.175, 0.5, -1.0, 1.0, 1.0, 1.0),
        ("grounding-bad", -0.275, -0.5, -1.0, 1.0, 1.0, 0.0),
    ]
    assert [example["id"] for example in report["best"]] == ["ok-1", "ok-2", "cost-bad"]


def test_nothing_to_score_is_a_report_of_zeros_and_no_example_is_shown_where_none_is_asked_for(tmp_path: Path) -> None:
    report = score_file(write_jsonl(tmp_path / "none.jsonl", []), PUBLISHED)
    assert (report["num_records"], report["average_reward"], report["pass_rate"]) == (0, 0.0, 0.0)
    unshown = score_file(write_jsonl(tmp_path / "six.jsonl", SIX_ROWS), PUBLISHED, top_k=0)
    assert report["best"] == report["worst"] == unshown["best"] == unshown["worst"] == []


def test_right_records_below_the_threshold_are_all_counted_and_the_first_named(tmp_path: Path) -> None:
    rows = [record(f"r{i:02}", "the category", "cat", ["dog"], ["cat"]) for i in range(30)]
    rows[1]["id"] = None
    report = score_file(write_jsonl(tmp_path / "rows.jsonl", rows), PUBLISHED, max_ids=4)
    assert report["accuracy"]["num_right_below_threshold"] == 30
    assert report["accuracy"]["right_below_threshold"] == ["r00", 2, "r02", "r03"]


# Words that meet each other in all the ways that the rules tell apart.
WORDS = (
    "red", "Red", "the", "not", "nor", "14", "14.0", "1,400", "1400", "14%", "0.14", "page", "isn't", "a",
    r"\boxed{14}",
)  # fmt: skip

GLUE = (" ", "-", ".", "", "  ", ", ", "'", "\n", "/", "s ")

texts = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GLUE)), max_size=4).map(
    lambda pairs: "".join(word + glue for word, glue in pairs)
)

words = st.one_of(texts, st.text(max_size=6))

numbers = st.one_of(st.integers(-20, 1400), st.floats(allow_nan=True))

json_values = st.one_of(words, numbers, st.none(), st.lists(words, max_size=2))

json_answers = st.one_of(
    json_values.map(lambda value: json.dumps({"answer": value})),
    words.map(lambda value: json.dumps({"text": value})),
    st.tuples(words, words).map(lambda pair: json.dumps({"a": pair[0], "b": pair[1]})),
    json_values.map(json.dumps),
    words.map(lambda value: f"```json\n{json.dumps({'answer': value})}\n```"),
)

entities = st.one_of(st.none(), st.lists(words, max_size=3))

rows = st.builds(
    record,
    id_=st.text("abc", min_size=1, max_size=3),
    response=st.one_of(words, json_answers),
    reference=st.one_of(st.none(), words, st.lists(words, max_size=3)),
    evidence=entities,
    claimed=entities,
    latency_ms=st.one_of(st.none(), st.integers(0, 900), st.floats(0, 900)),
    generated_tokens=st.one_of(st.none(), st.integers(0, 60)),
)


def assert_same(report: dict[str, Any], plain: dict[str, Any]) -> None:
    """The report of the command equals the one of plain Python."""
    assert report["num_records"] == plain["count"]
    assert report["accuracy"]["num_right"] == plain["num_manual_passes"]
    assert report["num_scored"] == plain["num_scored"]
    assert report["average_reward"] == pytest.approx(plain["average_reward"], abs=1.1e-6)
    assert report["pass_rate"] == plain["pass_rate"]
    for component, mean in plain["component_averages"].items():
        assert report["component_averages"][component] == pytest.approx(mean, abs=1.1e-6), component
    assert [example["id"] for example in report["best"]] == plain["best"]
    assert [example["id"] for example in report["worst"]] == plain["worst"]
    assert report["accuracy"]["right_below_threshold"] == plain["caught"]
    assert report["accuracy"]["num_right_below_threshold"] == plain["num_caught"]


SCORER = RecordScorer(options(PUBLISHED, Path(), top_k=SETTINGS["top_k"], max_ids=SETTINGS["max_ids"]))

PLAIN = {**SETTINGS, "latency_budget_ms": 400}


@settings(max_examples=400, deadline=None)
@given(st.lists(rows, min_size=1, max_size=8))
def test_the_published_rules_are_those_of_plain_python(found: list[dict[str, Any]]) -> None:
    batch = Batch(1, [json.dumps(row).encode() for row in found], 1)
    whole = ScoreSummary()
    whole.merge(SCORER.score(batch).summary, SETTINGS["top_k"], SETTINGS["max_ids"])
    assert_same(whole.report("contains", SETTINGS["pass_threshold"]), score_records(found, PLAIN))


def known_rows(num: int) -> list[dict[str, Any]]:
    """Prompts of several kinds with the five flaws."""
    references = ["red", "14", "1,400", "14%", "the big cat", "São Paulo", 'a "quoted" one', "-5", "2014"]
    return [corrupt(f"row-{i}", f"question {i}", f"{references[i % 9]}{i if i % 4 == 0 else ''}") for i in range(num)]


def test_thousands_of_corrupted_rows_score_as_in_plain_python(tmp_path: Path) -> None:
    found = known_rows(4000)
    path = write_jsonl(tmp_path / "rows.jsonl", found)
    report = score_file(path, PUBLISHED, num_processes=2, top_k=SETTINGS["top_k"], max_ids=SETTINGS["max_ids"])
    assert_same(report, score_records(found, PLAIN))


def test_neither_processes_nor_batches_change_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*known_rows(500), record("nothing", "", None), record(None, answer("x"), "x", latency_ms=777)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with path.open("a") as file:
        file.write("broken\n\n" + json.dumps(record("last", "red", ["red", "blue"])))  # without a newline
    whole = score_file(path, PUBLISHED, top_k=7, max_ids=50)
    for num_processes, least in ((1, 7), (3, 1), (2, 1000)):
        monkeypatch.setattr(scorer, "LEAST_ROWS", least)
        monkeypatch.setattr(scorer, "MOST_ROWS", least)
        assert score_file(path, PUBLISHED, num_processes=num_processes, top_k=7, max_ids=50) == whole
    assert whole["broken"][0]["row"] == 503
    assert whole["num_records"] == 503
