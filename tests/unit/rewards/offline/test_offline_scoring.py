"""Offline scoring as a whole: published figures, equality with plain Python, and no dependence on how a file is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from score_data import PUBLISHED_OPTIONS, SIX_ROWS, answer, options, record, score_file, score_rows, write_jsonl

from benchmarks.raw.score_reference import score_records
from mobula.rewards.offline.corruption import corrupt
from mobula.rewards.offline.options import ScoreOptions


def test_the_published_report_of_six_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "six.jsonl", SIX_ROWS)
    report = score_file(path, options(**PUBLISHED_OPTIONS), primary="aerorl")
    assert report["count"] == 6
    assert report["manual_baseline"]["pass_rate"] == 0.833333
    assert report["pass_rate"] == 0.5
    assert report["average_reward"] == 0.423333
    means = {"verifier": 0.333333, "grounding": 0.333333, "format": 0.7, "cost": 0.666667}
    assert report["component_averages"] == means
    assert report["weights"] == PUBLISHED_OPTIONS["weights"]
    assert report["diagnostics_found"] == {
        "format_issues": 1,
        "grounding_issues": 2,
        "verifier_issues": 1,
        "cost_issues": 1,
    }
    assert report["improvement"] == {
        "pass_rate_delta": -0.333333,
        "observability_gain": {"manual_dimensions": 1, "aerorl_dimensions": 4, "multiplier": 4.0},
        "manual_false_passes_caught": ["format-bad-contains", "grounding-hidden"],
        "quality_gate_gain": {"false_pass_rate": 0.4, "false_pass_count": 2},
    }
    worst = [(e["id"], e["total_reward"], e["components"]) for e in report["worst_examples"]]
    assert worst == [
        ("format-bad-contains", 0.415, {"verifier": 0.5, "grounding": 1.0, "format": -0.8, "cost": 1.0}),
        ("grounding-hidden", 0.175, {"verifier": 0.5, "grounding": -1.0, "format": 1.0, "cost": 1.0}),
        ("grounding-bad", -0.275, {"verifier": -0.5, "grounding": -1.0, "format": 1.0, "cost": 1.0}),
    ]
    assert [example["id"] for example in report["best_examples"]] == ["ok-1", "ok-2", "cost-bad"]


def test_ours_beside_the_published_reading(tmp_path: Path) -> None:
    report = score_rows(tmp_path, SIX_ROWS, **PUBLISHED_OPTIONS)
    # by hand: verifier 1, .5, -.5, 1, 1, 1, the others as published; totals 1, .415, -.275, .4, .9, 1
    assert report["component_averages"]["verifier"] == 0.666667
    assert report["average_reward"] == 0.573333
    assert report["others"]["aerorl"]["average_reward"] == 0.423333
    assert report["differences"]["num_records"] == {"verifier": 4, "grounding": 0, "format": 0, "cost": 0, "total": 4}
    assert report["differences"]["verdicts"] == {"passed_by_mobula_only": 0, "passed_by_aerorl_only": 0}
    shown = report["differences"]["examples"]["verifier"][0]
    assert shown["id"] == "ok-1"
    assert shown["rewards"]["mobula"]["total_reward"] == 1.0
    assert shown["rewards"]["aerorl"]["details"]["verifier"]["contains_reference"] is True


def test_nothing_to_score_is_a_report_of_zeros(tmp_path: Path) -> None:
    report = score_rows(tmp_path, [])
    assert {key: report[key] for key in ("count", "average_reward", "pass_rate", "component_averages")} == {
        "count": 0,
        "average_reward": 0.0,
        "pass_rate": 0.0,
        "component_averages": {},
    }
    assert report["best_examples"] == report["worst_examples"] == []
    assert "pass_threshold" not in report
    assert "weights" not in report


def test_no_example_is_shown_where_none_is_asked_for(tmp_path: Path) -> None:
    report = score_rows(tmp_path, SIX_ROWS, top_k=0)
    assert report["best_examples"] == report["worst_examples"] == []


def test_records_without_a_reference_are_counted_and_not_averaged(tmp_path: Path) -> None:
    rows = [record("a", answer("x"), "x", ["x"], ["x"]), record("b", answer("x"), None)]
    report = score_rows(tmp_path, rows)
    assert report["unscored"] == {"no reference": 1}
    assert report["num_scored"] == 1
    assert report["average_reward"] == report["pass_rate"] == 1.0
    assert report["others"]["aerorl"]["num_scored"] == 2
    assert report["differences"]["verdicts"]["passed_by_aerorl_only"] == 1  # format and cost alone reach 0.3


def test_false_passes_are_all_counted_and_the_first_are_named(tmp_path: Path) -> None:
    rows = [record(f"r{i:02}", "the category", "cat", ["dog"], ["cat"]) for i in range(30)]
    report = score_rows(tmp_path, rows, max_ids=4)
    assert report["improvement"]["quality_gate_gain"]["false_pass_count"] == 30
    assert report["improvement"]["manual_false_passes_caught"] == ["r00", "r01", "r02", "r03"]


# Words that meet each other in all the ways that the rules tell apart.
WORDS = (
    "red",
    "Red",
    "the",
    "not",
    "nor",
    "14",
    "14.0",
    "1,400",
    "1400",
    "14%",
    "0.14",
    "page",
    "isn't",
    "a",
    r"\boxed{14}",
)
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
    """The report of the command equals what plain Python computes."""
    assert report["count"] == plain["count"]
    assert report["manual_baseline"]["num_passed"] == plain["num_manual_passes"]
    for name, found in (("mobula", report), ("aerorl", report["others"]["aerorl"])):
        expected = plain[name]
        assert found["num_scored"] == expected["num_scored"], name
        if not found["num_scored"]:
            continue
        assert found["average_reward"] == pytest.approx(expected["average_reward"], abs=1.1e-6), name
        assert found["pass_rate"] == expected["pass_rate"], name
        for component, mean in expected["component_averages"].items():
            assert found["component_averages"][component] == pytest.approx(mean, abs=1.1e-6), (name, component)
        assert [example["id"] for example in found["best_examples"]] == expected["best"], name
        assert [example["id"] for example in found["worst_examples"]] == expected["worst"], name
        assert found["improvement"]["manual_false_passes_caught"] == expected["caught"], name
        assert found["improvement"]["quality_gate_gain"]["false_pass_count"] == expected["num_caught"], name
    differing = report["differences"]["num_records"]
    assert {name: differing[name] for name in plain["differences"]} == plain["differences"]


def plain_options(chosen: ScoreOptions) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in ScoreOptions.__dataclass_fields__}


@settings(max_examples=400)
@given(st.lists(rows, min_size=1, max_size=8), st.booleans())
def test_both_readings_are_those_of_plain_python(
    tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, Any]], is_published: bool
) -> None:
    chosen = options(**(PUBLISHED_OPTIONS if is_published else {}), max_ids=3)
    path = write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", found)
    assert_same(score_file(path, chosen), score_records(found, plain_options(chosen)))


def known_rows(num: int) -> list[dict[str, Any]]:
    """Prompts of several kinds with the five flaws."""
    references = ["red", "14", "1,400", "14%", "the big cat", "São Paulo", 'a "quoted" one', "-5", "2014"]
    return [corrupt(f"row-{i}", f"question {i}", f"{references[i % 9]}{i if i % 4 == 0 else ''}") for i in range(num)]


def test_thousands_of_corrupted_rows_score_as_in_plain_python(tmp_path: Path) -> None:
    found, chosen = known_rows(4000), options(**PUBLISHED_OPTIONS)
    path = write_jsonl(tmp_path / "rows.jsonl", found)
    assert_same(score_file(path, chosen), score_records(found, plain_options(chosen)))


@pytest.mark.parametrize(("num_processes", "num_bytes"), [(1, 997), (1, 20_000), (2, 30_000), (3, 4_000)])
def test_neither_processes_nor_stretches_change_the_report(tmp_path: Path, num_processes: int, num_bytes: int) -> None:
    rows = [*known_rows(500), record("nothing", "", None), record(None, answer("x"), "x", latency_ms=777)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with path.open("a") as file:
        file.write("broken\n\n" + json.dumps(record("last", "red", ["red", "blue"])))  # without a newline
    chosen = options(**PUBLISHED_OPTIONS, top_k=7, max_ids=50)
    whole = score_file(path, chosen, num_bytes=1 << 30)
    assert score_file(path, chosen, num_processes=num_processes, num_bytes=num_bytes) == whole
    assert whole["input"]["broken"][0]["line"] == 503
    assert whole["count"] == 503
