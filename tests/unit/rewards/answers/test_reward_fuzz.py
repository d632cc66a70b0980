"""What each rule gets wrong on labelled sets; no malformed answer crashes a rule, and none that is wrong gets 1.0."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz_rewards as fuzz
import pytest
from fuzz_rewards import MAY_BE_ONE, RULES, Findings
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_answers import WRONG

from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import FailureKind, RewardRequest, Score, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedPool
from mobula.rewards.tools import Tools

FIXTURES = Path(__file__).parent / "reward_fixtures"

OPTIONS: dict[str, dict[str, Any]] = {
    "math_answer": {"require_boxed": True},
    "multiple_choice": {"letters": "ABCD", "extract": "whole"},
    "exact_match": {"ignore_case": True, "whole_response": False},
    "anls": {"threshold": 0.5, "lengths": "raw", "extract": "whole"},
    "relaxed_accuracy": {"tolerance": 0.05, "extract": "whole"},
    "grounding": {"claims": "json:entities", "evidence": "evidence"},
}

THOUGHT = "There are three fish above and four below, so we add them. "

MISSED: dict[str, list[str]] = {
    "math_answer": [
        THOUGHT + r"\boxed{33.3\%} for \frac{1}{3}",
        THOUGHT + r"\boxed{0.05\text{ m}} for 5\text{ cm}",
        THOUGHT + r"\boxed{\text{five}} for 5",
        THOUGHT + r"\boxed{3+4} for 7",
        THOUGHT + r"\boxed{1.41} for \sqrt{2}",
        THOUGHT + r"\boxed{10:30} for 10{:}30",
        THOUGHT + r"\boxed{May 1, 2020} for 2020-05-01",
        THOUGHT + r"\boxed{7 \text{ fish, not } 8} for 7",
        r"The answer is 7 for 7",
    ],
    "multiple_choice": [
        r"It must be B for B",
        r"B, the red one for B",
        r"I choose B for B",
        r"(A) is too small, so the answer is (B) for B",
        r"B. vitamin C for B",
        r"the second for B",
        r"B - the red one for B",
    ],
    "exact_match": [
        r"seven for 7",
        r"New-York for New York",
        r"7.0 for 7",
        r"1000 for 1,000",
        r"cats for cat",
        r"naïve for naive",
        r"7% for 7",
        r"colour for color",
        r"U.S.A for U.S.A.",
    ],
    "anls": [],
    "relaxed_accuracy": [
        r"1,000 for 1000",
        r"100. for $100",
        r"yes. for yes",
        r"50 for 50%",
        r"about 100 for 100",
        r"one hundred for 100",
        r"light blue for blue, light",
        r"100 million for 100000000",
    ],
    "grounding": [
        '{"entities": ["cats"]} for cat',
        '{"entities": ["fourteen"]} for 14',
        '{"entities": ["NYC"]} for New York',
        '{"entities": ["$5"]} for 5',
        '{"entities": ["5 cm"]} for 5cm',
        '{"entities": ["U.S."]} for US',
        '{"entities": ["about 5"]} for 5',
    ],
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


def in_short(row: dict[str, Any]) -> str:
    """A row in short, as `MISSED` has it."""
    wanted = row["metadata"]["evidence"] if "metadata" in row else row["reference"]
    return f"{row['response']} for {', '.join(map(str, wanted))}"


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_wrong_is_right_and_what_is_missed_is_known(name: str, pool: IsolatedPool) -> None:
    rows = labelled(name)
    found = scores(name, rows, pool)
    least = 0.5 if name == "anls" else 1.0
    passed = [score.value >= least for score in found]
    assert [in_short(row) for row, ok in zip(rows, passed, strict=True) if ok and not row["right"]] == []
    assert [in_short(row) for row, ok in zip(rows, passed, strict=True) if row["right"] and not ok] == MISSED[name]
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


HANGS_S = 10.0  # a batch of a rule that nothing interrupts; a hundredth of it is usual


def check(findings: Findings) -> None:
    assert findings.defects == []
    failures = {kind for kinds in findings.outcomes.values() for kind in kinds} - {"value"}
    assert failures <= {f"failure {FailureKind.TIMED_OUT}", f"failure {FailureKind.FAILED}"}
    cheap = [kinds for rule, kinds in findings.outcomes.items() if rule in CHEAP]
    assert all(kinds.keys() == {"value"} for kinds in cheap), "a response is never what a cheap rule fails for"
    assert {rule: s for rule, s in findings.slowest_s.items() if rule in CHEAP and s > HANGS_S} == {}


def test_wrong_answers_and_garbage(functions: dict[str, Any]) -> None:
    findings = Findings()
    fuzz.fuzz_wrong(functions, 2000, random.Random(7), findings)
    fuzz.fuzz_garbage(functions, 2000, random.Random(8), findings)
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
    fuzz.fuzz_wrong(functions, 50_000, random.Random(9), findings)
    fuzz.fuzz_garbage(functions, 50_000, random.Random(10), findings)
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
        fuzz.fuzz_wrong(dict.fromkeys(RULES, function), 200, random.Random(1), findings)
        assert len(findings.defects) == 200 and all(found in defect for defect in findings.defects)
        assert findings.outcomes.keys() == WRONG.keys()
