"""No malformed answer crashes or hangs a rule, and none that is wrong by construction gets 1.0."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import fuzz_rewards as fuzz
import pytest
from fuzz_rewards import MAY_BE_ONE, RULES, Findings
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_answers import WRONG

from mobula.rewards.contract import FailureKind, RewardRequest, Score, evaluate_batch
from mobula.rewards.isolation.process import IsolatedPool

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
