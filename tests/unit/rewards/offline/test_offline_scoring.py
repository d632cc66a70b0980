"""Offline scoring as a whole: published figures, equality with plain Python, and no dependence on processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from score_data import PUBLISHED, SIX_ROWS, answer, options, record, score_file, write_jsonl

from benchmarks.harness.corruption import corrupt
from benchmarks.raw.score_reference import score_records
from benchmarks.score_records import SETTINGS
from mobula.rewards.offline import run
from mobula.rewards.offline.rows import Batch
from mobula.rewards.offline.scorer import RecordScorer, ScoreSummary


def test_the_published_report_of_six_rows(tmp_path: Path) -> None:
    report = score_file(write_jsonl(tmp_path / "six.jsonl", SIX_ROWS), PUBLISHED, writes_rows=True)
    means = {"verifier": 0.333333, "grounding": 0.333333, "format": 0.7, "cost": 0.666667, "contains": 0.833333}
    assert report["component_averages"] == means
    assert (report["num_records"], report["pass_rate"], report["average_reward"]) == (6, 0.5, 0.423333)
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


def test_nothing_to_score_is_a_report_of_zeros(tmp_path: Path) -> None:
    report = score_file(write_jsonl(tmp_path / "none.jsonl", []), PUBLISHED)
    assert (report["num_records"], report["average_reward"], report["pass_rate"]) == (0, 0.0, 0.0)
    assert report["best"] == report["worst"] == []


def test_no_example_is_shown_where_none_is_asked_for(tmp_path: Path) -> None:
    report = score_file(write_jsonl(tmp_path / "six.jsonl", SIX_ROWS), PUBLISHED, top_k=0)
    assert report["best"] == report["worst"] == []


def test_records_that_a_function_refuses_are_counted_and_not_averaged(tmp_path: Path) -> None:
    rows = [record("a", "x", "x"), record("b", "x", None)]
    report = score_file(write_jsonl(tmp_path / "rows.jsonl", rows), ["rewards=exact_match"])
    assert report["unscored"] == {"accuracy: failed": 1}
    assert (report["num_records"], report["num_scored"], report["average_reward"]) == (2, 1, 1.0)


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
        monkeypatch.setattr(run, "LEAST_ROWS", least)
        monkeypatch.setattr(run, "MOST_ROWS", least)
        assert score_file(path, PUBLISHED, num_processes=num_processes, top_k=7, max_ids=50) == whole
    assert whole["broken"][0]["row"] == 503
    assert whole["num_records"] == 503
