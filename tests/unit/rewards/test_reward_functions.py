"""Reward functions: what counts as the answer, what equals it, and what never does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from reward_data import request, values_or_kinds

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure, evaluate, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.functions.math_answer import MathAnswer, equals
from mobula.rewards.functions.parsing.extraction import find_boxes, given_references, last_boxed
from mobula.rewards.functions.parsing.math_tokens import plain
from mobula.rewards.functions.parsing.unicode_latex import plain_forms
from mobula.rewards.functions.response_form import Format
from mobula.rewards.functions.short_answers import ExactMatch
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools


class NoProcess(IsolatedProcess):
    """Fails the test that should have been decided without a process."""

    def __init__(self) -> None:
        super().__init__(timeout_s=1, start_timeout_s=1)

    def call(self, target: str, *args: object, **kwargs: object) -> object:
        raise AssertionError(f"{target}{args} went to the isolated process")


NO_PROCESS = Tools(NoProcess(), "cpu", "float32")
SCALES = {"response_scale": "pixels", "scale": "pixels"}
IOU = {"extract": "whole", "boxes": "boxes", "form": "xyxy", "min_iou": 0, **SCALES}
OCR = {"layout": "page", "target": "reference", "exact": True, "frame_stride": 1, "num_threads": 1}


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    process = IsolatedProcess(timeout_s=30, start_timeout_s=120)
    yield Tools(process, "cpu", "float32")
    process.close()


def score(function: object, text: str, *references: str) -> float:
    return evaluate(function, request(text, *references)).value


@pytest.mark.parametrize(
    ("text", "content"),
    [
        *[(text, "7") for text in (r"\boxed{7}", r"first \boxed{6}, then \boxed{7}.", r"\boxed {7}")],
        *[(text, "7") for text in (r"\boxed{7} and \boxed{8", r"\boxed{\boxed{7}}", r"line\\\boxed{7}")],
        (r"} } \boxed{7}", "7"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{}", ""),
        (r"\boxed{日本}", "日本"),
        *[(text, None) for text in (r"\boxed{7", r"\\boxed{7}", r"\boxed and", r"boxed{7}", "")],
        *[(text, " 7") for text in (r"\boxed 7", r"so $\boxed 7$.")],
        (r"\boxed7", "7"),
        (r"$\boxed x$", " x"),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_ten_megabytes_are_scanned_in_linear_time() -> None:
    started = time.monotonic()
    assert last_boxed("word " * 2_000_000 + r"\boxed{7}") == "7"
    assert last_boxed(r"\boxed{" * 300_000) is None
    assert find_boxes(r"\boxed{" * 100_000 + "}" * 100_000)[1] == 0
    assert score(MathAnswer(NO_PROCESS, require_boxed=False), "7" * 10_000_000, "7") == 0.0
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("answer", "reference", "is_equal"),
    [
        (" 7. ", "7", True),
        *[(answer, "7", False) for answer in ("", "3\n4")],
        ("7\x00", "8", False),
        *[(answer, answer, False) for answer in ("", " ", ".", "$$")],
        ("7", "", False),
    ],
)
def test_pairs_that_a_table_cannot_hold(answer: str, reference: str, is_equal: bool) -> None:
    """The others are rows of `reward_fixtures/mathematics.tsv`."""
    assert equals(answer, reference) is is_equal


def test_any_reference_will_do(tools: Tools) -> None:
    function = MathAnswer(tools, require_boxed=True)
    assert score(function, r"\boxed{7}", "6", "7") == 1.0
    assert score(function, r"\boxed{\sqrt{49}}", "6", "7") == 1.0
    assert score(function, r"\boxed{8}", "6", "7") == 0.0


@pytest.mark.parametrize(
    ("response", "reference", "value"),
    [
        (r"So $\boxed{2}, \boxed{3}$.", "3,2", 1.0),
        (r"It is \boxed{(2,2)} and \boxed{(6,2)}.", "(2,2),(6,2)", 1.0),
        (r"\boxed{1}, \boxed{2}\text{ or }\boxed{3}", "1,2,3", 1.0),
        (r"So $\boxed{2}, \boxed{3}$.", "3", 0.0),
        (r"\boxed{6}, no, \boxed{7}", "7", 1.0),
        (r"\boxed{6}. So \boxed{7}", "7", 1.0),
        (r"\boxed{6} \boxed{7}", "6,7", 0.0),
        (r"thus $\boxed 7$", "7", 1.0),
    ],
)
def test_boxes_that_end_a_response_as_a_list_are_one_answer(response: str, reference: str, value: float) -> None:
    assert score(MathAnswer(NO_PROCESS, require_boxed=True), response, reference) == value


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "100000!",
        r"e^{e^{e^{e^{9}}}}",
        "(" * 490 + "7" + ")" * 490,
        r"\sqrt" * 150 + "7",
        r"\frac{1}{" * 90 + "7" + "}" * 90,
        r"\sum_{i=1}^{999}\sum_{j=1}^{999}\sum_{k=1}^{999} ijk",
        r"\int_0^1\int_0^1 \sin(10^{9}xy) dx dy",
        r"\int_0^{\infty} \exp(x) dx",
        r"\binom{10^{9}}{10^{8}}",
        r"\sin 10^{10000}",
        "1" * 990,
        "|" * 900,
        "1,2;" * 240,
    ],
)
def test_no_answer_takes_long(answer: str) -> None:
    started = time.process_time()
    assert score(MathAnswer(NO_PROCESS, require_boxed=True), rf"\boxed{{{answer}}}", "8") == 0.0
    assert time.process_time() - started < 5


def test_without_require_boxed_the_whole_response_is_the_answer(tools: Tools) -> None:
    lenient, strict = MathAnswer(tools, require_boxed=False), MathAnswer(tools, require_boxed=True)
    assert score(lenient, " 7 ", "7") == 1.0 and score(strict, "7", "7") == 0.0
    assert score(lenient, "I see 7 fish, or 8.", "7") == 0.0
    assert score(lenient, r"7 \boxed{8}", "7") == 0.0
    assert score(lenient, r"\sqrt{49}", "7") == 1.0 and score(lenient, r"\sqrt{49}} is one of {", "7") == 0.0


@pytest.mark.parametrize("references", [(), ("",), (" ",)])
def test_a_prompt_without_reference_is_refused_not_scored_zero(references: tuple[str, ...]) -> None:
    with pytest.raises(RewardError, match="no reference"):
        score(MathAnswer(NO_PROCESS, require_boxed=True), r"\boxed{}", *references)
    with pytest.raises(RewardError, match="no reference"):
        score(ExactMatch(NO_PROCESS, ignore_case=True, whole_response=True), "", *references)


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
@example(0, -0)
@example(7, 70)
def test_whole_numbers_score_as_they_compare(answer: int, reference: int) -> None:
    function = MathAnswer(NO_PROCESS, require_boxed=True)
    assert score(function, rf"\boxed{{{answer}}}", str(reference)) == float(answer == reference)
    assert score(function, rf"\boxed{{{answer:,}}}", str(answer)) == 1.0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=9), st.integers(0, 8), st.integers(1, 9))
def test_one_changed_digit_is_never_right(value: object, place: int, change: int) -> None:
    written = f"{value:f}"
    index = len(written) - 1 - place
    wrong = written[:index] + str((int(written[index]) + change) % 10) + written[index + 1 :]
    assert not equals(wrong, written)


@given(st.text(), st.sampled_from([r"\boxed{", "}", "{", "\\", ""]), st.text())
def test_no_text_breaks_extraction_or_presets(before: str, middle: str, after: str) -> None:
    text = before + middle + after
    boxes, num_unclosed = find_boxes(text)
    assert num_unclosed >= 0 and all(text[box.start :].startswith(r"\boxed") for box in boxes)
    for preset in ("boxed", "think_answer"):
        assert score(Format(NO_PROCESS, preset=preset), text) in (0.0, 1.0)
    assert not equals(text, "7") or "7" in plain(text)


@given(st.text(alphabet=r"0123456789\{}()^_/+-*=., frac sqrt boxed", max_size=30))
def test_no_answer_breaks_the_plain_comparison(answer: str) -> None:
    assert equals(answer, "7") in (True, False)
    assert equals(answer, answer) is (plain(answer) != "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, 1.0) for text in (r"It is \boxed{7}", " \\boxed{7}\n ", r"\boxed{\frac{1}{2}}")],
        *[(text, 0.0) for text in (r"\boxed{7}.", r"\boxed{7} \boxed{7}", r"\boxed{7} \boxed{", r"\boxed{\boxed{7}}")],
        *[(text, 0.0) for text in (r"\boxed{7", r"\boxed{ }", "7", "")],
    ],
)
def test_the_boxed_format_is_one_box_at_the_end(text: str, value: float) -> None:
    assert score(Format(NO_PROCESS, preset="boxed"), text) == value


def test_a_pattern_must_match_the_whole_response(tools: Tools) -> None:
    function = Format(tools, pattern=r"a.*b")
    assert [score(function, text) for text in ("a\nb", "a\nb ", "xab")] == [1.0, 0.0, 0.0]


def test_exact_match_of_the_whole_response_respects_aliases_and_case() -> None:
    whole = ExactMatch(NO_PROCESS, ignore_case=False, whole_response=True)
    assert [score(whole, text, "cat", "tabby cat") for text in (" tabby cat ", "Cat")] == [1.0, 0.0]


def test_exact_match_ends_in_time_however_often_an_alias_or_an_accent_stands_there() -> None:
    anywhere = ExactMatch(NO_PROCESS, ignore_case=False, whole_response=False)
    assert score(anywhere, "a" * 3_000_000, "a" * 5000) == 0.0
    assert score(anywhere, "a" * 3_000_000 + " aa.", "aa") == 1.0
    assert score(anywhere, "a" + "\u0301\u0323" * 500_000, "á") == 0.0


def test_accents_are_one_whichever_way_they_are_written() -> None:
    whole = ExactMatch(NO_PROCESS, ignore_case=False, whole_response=True)
    assert score(whole, "cafe\u0301", "café") == score(whole, "s\u0323\u0307", "\u1e69") == 1.0
    many = "e" + "\u0301" * 100
    assert score(whole, many, many) == 1.0 and score(whole, many, many + "\u0301") == 0.0


WORD, MINUS = r"\w", "\N{MINUS SIGN}\N{EN DASH}"
PIECES = [*"7a-+.,/%: \né(*_", "12", "cat", "c++", "\N{MINUS SIGN}"]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.lists(st.sampled_from(PIECES), min_size=1, max_size=3))
@settings(max_examples=500)
def test_exact_match_is_a_search_for_the_alias_between_its_edges(pieces: list[str], alias: list[str]) -> None:
    """The definition as one pattern with the alias in it, every occurrence of which is tried by `re`."""
    answer, wanted = plain_forms("".join(pieces).strip()), plain_forms(" ".join("".join(alias).split()))
    assume(wanted and answer)
    begins = rf"(?<![-+.{MINUS}])(?<![0-9][,:/^*])" if wanted[0].isdigit() else rf"(?<!{WORD}-)"
    ends = rf"(?![-+.,:/^*{MINUS[1]}][0-9])(?!\s?%)" if wanted[-1].isdigit() else rf"(?!-{WORD})"
    pattern = rf"(?<!{WORD}){begins}{re.escape(wanted)}{ends}(?!{WORD})"
    anywhere = ExactMatch(NO_PROCESS, ignore_case=False, whole_response=False)
    assert score(anywhere, answer, wanted) == float(re.search(pattern, " ".join(answer.split())) is not None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("math_anwser", {}, "did you mean 'math_answer'"),
        ("math_answer", {"require_box": True}, "did you mean 'require_boxed'"),
        ("math_answer", {}, "require_boxed=None and extract=None: set exactly one"),
        ("math_answer", {"extract": "json"}, "extract='json' is no way to find the answer"),
        ("overlong", {"max_tokens": 8, "penalty": 1.0}, "needs options.buffer_tokens"),
        ("math_answer", {"require_boxed": "false"}, "neither true nor false"),
        ("math_answer", {"tools": None}, "no option 'tools'"),
        ("format", {}, "exactly one"),
        ("format", {"preset": "box"}, "use one of boxed, think_answer"),
        ("format", {"preset": "boxed", "pattern": "a"}, "exactly one"),
        ("format", {"tags": "think"}, "list of different names"),
        ("format", {"tags": ["a", "a"]}, "list of different names"),
        ("format", {"tags": ["<think>"]}, "names alone"),
        ("format", {"json_fields": []}, r"json_fields=\[\] is unfit"),
        ("exact_match", {"ignore_case": True, "whole_response": True, "extract": "tags:"}, "no way to find the answer"),
        ("multiple_choice", {"letters": "AbC", "extract": "whole"}, "letters='AbC' is unfit"),
        ("multiple_choice", {"letters": "ABA", "extract": "whole"}, "letters='ABA' is unfit"),
        ("anls", {"threshold": 1.5, "lengths": "raw", "extract": "whole"}, "threshold=1.5 is unfit"),
        ("anls", {"threshold": 0.5, "lengths": "long", "extract": "whole"}, "use raw or folded"),
        ("relaxed_accuracy", {"tolerance": float("nan"), "extract": "whole"}, "tolerance=nan is unfit"),
        ("grounding", {"claims": "entities", "evidence": "e"}, "use metadata:KEY, json:FIELD or fenced_json:FIELD"),
        ("cost", {"target_tokens": 0, "latency_budget_ms": None}, "target_tokens=0 is unfit"),
        ("overlong", {"max_tokens": 8, "buffer_tokens": 9, "penalty": 1.0}, "buffer_tokens=9 is unfit"),
        ("language", {"language": "en", "among": ["de", "fr"], "min_letters": 5}, "list 'en' and the languages"),
        ("language", {"language": "xx", "among": ["xx", "fr"], "min_letters": 5}, "ISO 639-1"),
        ("script_share", {"code_points": [2, 1]}, "give the first and the last code point"),
        ("script_share", {"code_points": [True, 5]}, "give the first and the last code point"),
        ("iou", {**IOU, "form": "cxcywh"}, "use one of xyxy, xywh"),
        ("iou", {**IOU, "scale": "percent"}, "use one of relative, thousandths, pixels"),
        ("ocr", {**OCR, "target": "prompt"}, "use reference or quoted_prompt"),
        ("ocr", {**OCR, "layout": "word"}, "use page, or line"),
        ("ocr", {**OCR, "frame_stride": 0}, "frame_stride=0 is unfit"),
        ("jpeg_size", {"wanted": "tiny", "quality": 95, "scale": 1.0}, "use small or large"),
        ("jpeg_size", {"wanted": "small", "quality": 100, "scale": 1.0}, "quality=100 is unfit"),
        ("jpeg_size", {"wanted": "small", "quality": 95, "scale": 0}, "scale=0 divides by nothing"),
        ("no/such/file.py:f", {}, "no file .*no/such/file.py here"),
        ("format", {"pattern": "("}, "no regular expression"),
        ("exact_match", {"ignore_case": 1, "whole_response": True}, "neither true nor false"),
    ],
)
def test_unfit_functions_and_options_are_refused_by_name(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_function(name, options, NO_PROCESS)


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such_function", ":f", "math:pi"])
def test_a_users_function_that_is_not_there_is_refused(name: str, tools: Tools) -> None:
    with pytest.raises(ValueError, match=f"reward function '{name}' cannot be imported .*name a function"):
        build_function(name, {}, tools)


@pytest.mark.parametrize(
    ("result", "kind", "reason"),
    [
        (1e19, FailureKind.NOT_FINITE, r"returned 1e\+19: return a number of at most 1e\+18"),
        (-1e308, FailureKind.NOT_FINITE, "at most"),
        (10**400, FailureKind.NOT_FINITE, "no float holds"),
        (Fraction(10**400), FailureKind.NOT_FINITE, "no float holds"),
        (Score(1.0, "", {"part": 10**400}), FailureKind.NOT_FINITE, "no float holds as 'part'"),
        (Score(1.0, "", {"part": float("nan")}), FailureKind.NOT_FINITE, "nan as 'part'"),
        (Score(1.0, "", [1, 2]), FailureKind.FAILED, "breakdown=\\[1, 2\\]"),
        (Score(1.0, "", None), FailureKind.FAILED, "breakdown=None"),
        (Score(1.0, "", {1: 0.5}), FailureKind.FAILED, "breakdown={1: 0.5}"),
        (Score(1.0, None), FailureKind.FAILED, "reason=None"),
        ("1", FailureKind.FAILED, "returned str"),
        (1j, FailureKind.FAILED, "returned complex: return a finite number"),
    ],
)
def test_a_result_that_is_none_costs_its_response_alone(result: Any, kind: FailureKind, reason: str) -> None:
    class Batched:
        def score_batch(self, requests: Sequence[RewardRequest]) -> list[Any]:
            return [result, 0.5]

    for function in (Batched(), lambda r: result if r.response.text == "1" else 0.5):
        failure, right = evaluate_batch(function, [request("1"), request("2")])
        assert isinstance(failure, ScoringFailure) and failure.kind is kind and re.search(reason, failure.reason)
        assert right == Score(0.5)


class Halves:
    """Scores many at once; what has no number is named, and costs no other response."""

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | Outcome]:
        answers: list[float | Outcome] = []
        for text in (r.response.text for r in requests):
            answers.append(ScoringFailure(FailureKind.TIMED_OUT, "slow") if text == "slow" else float(text) / 2)
        return answers


@pytest.mark.parametrize(
    ("function", "texts", "expected"),
    [
        (Halves(), ("1", "nan", "slow", "3"), [0.5, FailureKind.NOT_FINITE, FailureKind.TIMED_OUT, 1.5]),
        (Halves(), ("1", "no number"), [FailureKind.FAILED] * 2),  # it raises
        (lambda r: float(r.response.text), ("1", "x", "inf"), [1.0, FailureKind.FAILED, FailureKind.NOT_FINITE]),
    ],
)
def test_each_request_of_a_batch_has_an_outcome(function: Any, texts: Sequence[str], expected: list[Any]) -> None:
    assert values_or_kinds(evaluate_batch(function, [request(text) for text in texts])) == expected


def test_the_line_with_four_marks_of_a_worked_answer_is_the_reference() -> None:
    worked = "Half of 48 is 24.\n#### 24"
    assert given_references((worked, "", "#### 24", "a #### b")) == ("24", "24", "a #### b")
