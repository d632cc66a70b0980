"""What each rule gets wrong on labelled sets; no malformed answer crashes a rule, and none that is wrong gets 1.0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import fuzz_rewards as fuzz
import pytest
from fuzz_rewards import FIXTURES, MAY_BE_ONE, RULES, WRONG, Findings
from hypothesis import given, settings
from hypothesis import strategies as st

from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import FailureKind, RewardRequest, Score, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedPool
from mobula.rewards.tools import Tools

OPTIONS: dict[str, dict[str, Any]] = {
    "math_answer": {"require_boxed": True},
    "multiple_choice": {"letters": "ABCD", "extract": "whole"},
    "exact_match": {"ignore_case": True, "whole_response": False},
    "anls": {"threshold": 0.5, "lengths": "raw", "extract": "whole"},
    "relaxed_accuracy": {"tolerance": 0.05, "extract": "whole"},
    "grounding": {"claims": "json:entities", "evidence": "evidence"},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[IsolatedPool]:
    pool = IsolatedPool(num_processes=2, timeout_s=30, start_timeout_s=120)
    yield pool
    pool.close()


def labelled(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def scores(name: str, rows: list[dict[str, Any]], pool: IsolatedPool) -> list[Score]:
    function = build_function(name, OPTIONS[name], Tools(pool, "cpu", "float32"))
    requests = [
        RewardRequest(Response(row["response"], 1, False), tuple(row["reference"]), row.get("metadata", {}), "")
        for row in rows
    ]
    outcomes = evaluate_batch(function, requests)
    assert all(isinstance(outcome, Score) for outcome in outcomes), "every one of them can be scored"
    return [outcome for outcome in outcomes if isinstance(outcome, Score)]


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_wrong_is_right_and_what_is_missed_is_known(name: str, pool: IsolatedPool) -> None:
    """Right answers that a rule is known to miss are labelled `missed`."""
    rows = labelled(name)
    least = 0.5 if name == "anls" else 1.0
    for row, score in zip(rows, scores(name, rows, pool), strict=True):
        assert (score.value >= least) == (row["right"] and not row.get("missed", False)), row
    assert min(sum(row["right"] for row in rows), sum(not row["right"] for row in rows)) >= 10


def test_anls_has_the_published_values(pool: IsolatedPool) -> None:
    rows = labelled("anls")
    assert [score.value for score in scores("anls", rows, pool)] == pytest.approx([row["value"] for row in rows])


@pytest.mark.parametrize("name", ["mathematics", "shapes"])
def test_answers_in_mathematics_score_by_their_meaning(name: str, pool: IsolatedPool) -> None:
    """Rows `answer, reference, 1 or 0`: numbers, units, money, words, Unicode, algebra; in `shapes` lists, sets,
    intervals, equations, and values that differ in their type or in one sign only."""
    lines = (FIXTURES / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    table = [line.split("\t") for line in lines if not line.startswith("#")]
    rows = [{"response": rf"So \boxed{{{answer}}}.", "reference": [reference]} for answer, reference, _ in table]
    found = [f"{score.value:g}" for score in scores("math_answer", rows, pool)]
    assert len(table) >= 300
    assert [(*row, got) for row, got in zip(table, found, strict=True) if row[2] != got] == []


CHEAP = [rule for rule in RULES if not rule.startswith(("math", "format_pattern"))]  # those without a process


@pytest.fixture(scope="module")
def functions() -> Iterator[dict[str, Any]]:
    pool = IsolatedPool(num_processes=2, timeout_s=2, start_timeout_s=120)
    yield fuzz.build(pool)
    pool.close()


HANGS_S = 10.0  # of CPU time, a batch of a rule that nothing interrupts; a hundredth of it is usual


def check(findings: Findings) -> None:
    assert findings.defects == []
    failures = {kind for kinds in findings.outcomes.values() for kind in kinds} - {"value"}
    assert failures <= {f"failure {FailureKind.TIMED_OUT}", f"failure {FailureKind.FAILED}"}
    cheap = [kinds for rule, kinds in findings.outcomes.items() if rule in CHEAP]
    assert all(kinds.keys() == {"value"} for kinds in cheap), "a response is never what a cheap rule fails for"
    assert {rule: s for rule, s in findings.slowest_s.items() if rule in CHEAP and s > HANGS_S} == {}


def test_wrong_answers_and_garbage(functions: dict[str, Any]) -> None:
    findings = Findings()
    fuzz.fuzz_wrong(functions, 2000, Random(7), findings)
    fuzz.fuzz_garbage(functions, 2000, Random(8), findings)
    check(findings)


def test_the_corpus(functions: dict[str, Any]) -> None:
    once = {rule: function for rule, function in functions.items() if rule not in ("math_whole", "math_json")}
    findings = Findings()
    fuzz.fuzz_corpus(once, 100_000, findings)
    check(findings)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_answers_and_ten_megabytes(functions: dict[str, Any]) -> None:
    findings = Findings()
    fuzz.fuzz_wrong(functions, 50_000, Random(9), findings)
    fuzz.fuzz_garbage(functions, 50_000, Random(10), findings)
    fuzz.fuzz_corpus(functions, fuzz.HUGE, findings)
    check(findings)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("answer", "entities", "bbox")), inner),
    max_leaves=12,
)

FIELDS = JSON.map(lambda value: json.dumps({"answer": value, "entities": value}))


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(), JSON.map(json.dumps), FIELDS))
def test_no_text_and_no_json_breaks_a_cheap_rule(functions: dict[str, Any], text: str) -> None:
    for rule in CHEAP:
        [outcome] = evaluate_batch(functions[rule], [fuzz.asked(rule, text)])
        assert isinstance(outcome, Score), (rule, outcome)
        assert -1 <= outcome.value <= 1 and (outcome.value < 1 or rule in MAY_BE_ONE or "48611" in text), rule


def test_the_fuzzing_sees_defects() -> None:
    def always_right(request: RewardRequest) -> float:
        return 1.0

    def broken(request: RewardRequest) -> float:
        raise IndexError("list index out of range")

    for function, found in ((always_right, "gave 1.0"), (broken, "raised IndexError")):
        findings = Findings()
        fuzz.fuzz_wrong(dict.fromkeys(RULES, function), 200, Random(1), findings)
        assert len(findings.defects) == 200 and all(found in defect for defect in findings.defects)
        assert findings.outcomes.keys() == WRONG.keys()
