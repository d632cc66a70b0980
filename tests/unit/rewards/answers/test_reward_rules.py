"""The rules that need no process: each has the numbers of its definition, and names what it does not score."""

from __future__ import annotations

import json
import math
import sys
import timeit
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from data_rows import encoded
from PIL import Image, ImageDraw, ImageFont
from reward_data import TOOLS, request, score

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import RewardRequest, Score, evaluate
from mobula.rewards.functions import EXTRAS, build_function
from mobula.rewards.functions.grounding import entity
from mobula.rewards.functions.parsing.extraction import extractor, read_json
from mobula.rewards.tools import Tools


@pytest.mark.parametrize(
    ("way", "text", "answer", "flaw"),
    [
        ("whole", " 7\n", "7", ""),
        ("whole", " \n", "", "empty answer"),
        ("last_line", "think\n\n 7 \n\n", "7", ""),
        ("last_number", "4 + 3 = 7.", "7", ""),
        ("last_number", "4+3=7", "7", ""),
        ("last_number", "It is -1,234.50 m, I think.", "-1,234.50", ""),
        ("last_number", "5-3", "3", ""),
        ("last_number", "seven", "", "no number"),
        ("boxed", r"\boxed{6} \boxed{7}", "7", ""),
        ("boxed", "7", "", r"no \boxed{} answer"),
        ("boxed", r"\boxed{ }", "", "empty answer"),
        ("tags:answer", "<think>6</think><answer> 7 </answer>", "7", ""),
        ("tags:answer", "<answer>7</answer><answer>8</answer>", "", "2 times <answer> instead of once"),
        ("tags:answer", "</answer>7<answer>", "", "</answer> before <answer>"),
        ("json:answer", '{"answer": "7", "why": [1, {"answer": "8"}]}', "7", ""),
        ("json:answer", '{"answer": 1.10}', "1.10", ""),
        ("json:answer", '{"answer": 1e999}', "1e999", ""),
        ("json:answer", f'{{"answer": {"7" * 5000}}}', "7" * 5000, ""),
        ("json:answer", '{"answer": true}', "true", ""),
        ("json:answer", '{"answer": null}', "", "field 'answer' is null"),
        ("json:answer", '{"answer": ["7"]}', "", "field 'answer' is an array"),
        ("json:answer", '{"answer": "7", "answer": "8"}', "", "not strict JSON: a name comes twice"),
        ("json:answer", '{"answer": NaN}', "", "not strict JSON: NaN is no number"),
        ("json:answer", '{"answer": -Infinity}', "", "not strict JSON: -Infinity is no number"),
        ("json:answer", '["answer"]', "", "not a JSON object: an array"),
        ("json:answer", '{"Answer": "7"}', "", "no field 'answer'"),
        ("json:answer", '{"answer": "7"} ok', "", "not JSON: Extra data"),
        ("json:answer", "{'answer': '7'}", "", "not JSON: Expecting property name"),
        ("json:answer", '{"answer": "7",}', "", "not JSON: "),
        ("json:answer", '```json\n{"answer": "7"}\n```', "", "not JSON: "),
        ("fenced_json:answer", 'So:\n```json\n{"answer": "7"}\n```\ndone', "7", ""),
        ("fenced_json:answer", '```\n{"answer": "7"}```', "7", ""),
        ("fenced_json:answer", '{"answer": "7"}', "7", ""),
        ("fenced_json:answer", '```python\n{"answer": "7"}\n```', "", "a code block of another kind than JSON"),
        ("fenced_json:answer", '```\n{"answer": "7"}\n```\n```', "", "3 code fences instead of a pair"),
        ("json:answer", "[" * 1_000_000, "", "not JSON that can be read: nested too deep"),
        ("json:answer", '{"answer":' * 1_000_000, "", "not JSON that can be read: nested too deep"),
    ],
)
def test_an_answer_is_found_or_its_absence_has_a_reason(way: str, text: str, answer: str, flaw: str) -> None:
    found, reason = extractor(way)(text)
    assert found == answer and reason.startswith(flaw) and bool(reason) == bool(flaw)


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', "{}", "0", '" "', '[1.0, {"a": null}]'])
def test_what_the_standard_admits_is_read(text: str) -> None:
    value, flaw = read_json(text, fenced=False)
    assert flaw == "" and value == json.loads(text, parse_int=str, parse_float=str)


@pytest.mark.parametrize(
    ("text", "alias", "value"),
    [
        *[(text, "7", 1.0) for text in ("It is 7.", "7, or so", "(7)")],
        *[(text, "7", 0.0) for text in ("-7", "\N{MINUS SIGN}7", "3.7", "7.5", "7,000", "7/8", "7:30", "7%", "7 %")],
        *[(text, "7", 0.0) for text in ("17", "7-8")],
        ("1,007", "007", 0.0),
        ("7%", "7%", 1.0),
        ("-7", "-7", 1.0),
        *[(text, "7", 1.0) for text in ("答案是7。", "答案是7个", "答案是７", "７")],
        *[(text, "7", 0.0) for text in ("答案是17个", "答案是－７", "答案是７％", "答案是7.5")],
        ("is １２", "12", 1.0),
        ("东京", "京", 0.0),
        ("don’t", "don't", 1.0),
        *[(text, "cat", value) for text, value in (("category", 0.0), ("concatenate", 0.0), ("a cat", 1.0))],
        ("It is a  Tabby\ncat.", "tabby CAT", 1.0),
        *[(text, "Germany", 0.0) for text in ("wrong-Germany", "Germany-born")],
        *[(text, "Germany", 1.0) for text in ("- Germany", "Germany - Berlin", "Germany's")],
        ("c++ rocks", "C++", 1.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("cafe\u0301", "cafe", 0.0),
    ],
)
def test_words_and_numbers_match_between_their_boundaries(text: str, alias: str, value: float) -> None:
    assert score("exact_match", {"ignore_case": True, "whole_response": False}, request(text, alias)).value == value


def test_an_accent_makes_one_entity_however_it_is_encoded() -> None:
    assert entity("the Cafe\u0301") == entity("caf\u00e9")


def test_exact_match_compares_what_was_extracted() -> None:
    options = {"ignore_case": True, "whole_response": True, "extract": "json:answer"}
    assert score("exact_match", options, request('{"answer": "Red"}', "red")) == Score(1.0)
    assert score("exact_match", options, request("red", "red")).reason.startswith("not JSON")
    assert score("exact_match", options, request('{"answer": ""}', "red")) == Score(0.0, "empty answer")


CHOICES_OF_B = (
    "B", "b", "(B)", "(b)", "B.", "B)", "B:", " **B** ", "$B$", '"B"', "[B]", "B.\n", r"\boxed{B}",
    r"\boxed{\text{B}}", r"\boxed{(B)}", r"\boxed{\textbf{(B)}}", "B. the second cat", "(B) a cat", "B) cat",
    "**B.** cat", "B: cat", "answer: B", "Answer: (B)", "The answer is B.", "the correct option is: B",
    "A dog is here, so the answer is B", "**Answer:** B", "My choice is option B", "\uff22", "\uff08B\uff09",
    "B\N{IDEOGRAPHIC FULL STOP}", r"A \boxed{B}", "Option B is correct", "B is right", "(B) is the correct answer",
    "**B** is correct.", "答案是B", "答案：B", "正确答案为（B）。", "选B", "选项 B",
    r"\boxed{(B)\ 12}", "The answer is Ｂ",
)  # fmt: skip
NO_CHOICES = (
    "答案是B不是C", "The answer is B because it isn’t red", "I do not think the answer is B",
    "I don’t think B is correct",
    "It isn’t true that B is right", "B is hardly correct", "By no means B is correct", "The answer is B, not at all",
    "B is not correct", "The answer is A. Wait, actually B", "Answer: B. Wait, no", "Is option B correct?",
    "Is the answer B?", "答案不是B", "不选B", "答案是B或C", "答案是B吗？", "A is correct and B is correct", "",
    "cat", "Blue", "B2",
    "AB", "A B", "A, B", "A or B", "(A) or (B)", "Vitamin B", "answer: a cat", "the answer is A cat", "B is wrong",
    "Option B is", "answer: A. No: answer: B", "answer: B or C", "B or C", "answer: B, or (c)", "B?",
    "answer: B was refuted", "The answer: B would do", "The answer is B, I disagree", "the answer is not B", "not B",
    "answer: B is wrong", "B. No wait, not the answer", "B. or C. will do", "Wrong: the answer is B", "answer: B?",
    "\u0412", r"\boxed{}", r"\boxed{A, B}", r"\boxed{B} \boxed{}", "answer: BB", "answer: B's",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "letter"), [*[(text, "B") for text in CHOICES_OF_B], *[(text, "") for text in NO_CHOICES]]
)
def test_a_choice_is_one_letter_in_a_form_of_its_own(text: str, letter: str) -> None:
    options = {"letters": "ABCD", "extract": "whole"}
    values = {right: score("multiple_choice", options, request(text, right)).value for right in "ABCD"}
    assert values == {right: float(right == letter) for right in "ABCD"}


def test_a_rule_reads_the_response_and_never_the_prompt() -> None:
    """LightRFT defect B5: rules read the whole conversation, so a system prompt that shows the tags gave the format's
    reward to an answer without tags, and took it from a right one."""
    shown = "Write <think></think><answer></answer>, and the answer in \\boxed{7}."
    tags, boxed = {"tags": ["think", "answer"]}, "<think>3 + 4</think><answer>7</answer>"
    assert score("format", tags, request("7", prompt=shown)).value == 0
    assert score("format", tags, request(boxed, prompt=shown)).value == 1


def test_a_choice_needs_a_reference_that_is_one() -> None:
    options = {"letters": "ABCD", "extract": "tags:answer"}
    right = request("<think>A or B</think><answer>(B)</answer>", "(B) the second")
    assert score("multiple_choice", options, right) == Score(1.0)
    with pytest.raises(RewardError, match="no reference names one option: 'cat', 'E'"):
        score("multiple_choice", options, request("B", "cat", "E"))


@pytest.mark.parametrize(
    ("answer", "references", "raw", "folded"),
    [
        ("cat", ("cat",), 1.0, 1.0),
        (" CAT\n", ("cat",), 1.0, 1.0),
        ("cut", ("cat",), 1 - 1 / 3, 1 - 1 / 3),
        ("cut", ("dog", "cute"), 0.75, 0.75),
        ("ab", ("abcd",), 0.5, 0.5),  # at the threshold
        ("ab", ("abcde",), 0.0, 0.0),  # 0.4 is below it
        ("a  c", ("a b",), 0.75, 1 - 1 / 3),  # raw: 4 characters, two blanks
        ("dx       x", ("cat",), 0.6, 0.0),  # blanks buy the raw one
        ("dog", ("cat",), 0.0, 0.0),
        ("cafe\u0301", ("caf\u00e9",), 1.0, 1.0),
    ],
)
def test_anls_has_the_published_values(answer: str, references: tuple[str, ...], raw: float, folded: float) -> None:
    for lengths, value in {"raw": raw, "folded": folded}.items():
        options = {"threshold": 0.5, "lengths": lengths, "extract": "whole"}
        assert score("anls", options, request(answer, *references)).value == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        *[(answer, "100", 1.0) for answer in ("105", "95", "1e2")],
        *[(answer, "100", 0.0) for answer in ("105.1", "-100", "1e999", "nan", "inf", "9" * 5000)],
        *[(answer, "-100", 1.0) for answer in ("-98", "\N{MINUS SIGN}98")],
        *[(answer, "0.5", 1.0) for answer in ("50%", "50 %")],
        ("0.5", "50%", 1.0),
        ("50", "50%", 0.0),
        ("\uff15\uff10", "50", 1.0),
        *[(answer, "0", 1.0) for answer in ("0", "0.0")],  # the public scorers compare a reference of 0 as text
        ("-0", "0.0", 1.0),
        *[(answer, "0", 0.0) for answer in ("0.01", "zero")],
        ("1,000", "1000", 0.0),
        *[(text, text, 1.0) for text in ("1,000", "1e999")],
        *[(answer, "yes", value) for answer, value in (("Yes", 1.0), ("yes.", 0.0), ("100", 0.0))],
        *[(answer, "10", 0.0) for answer in ("1_0", "\u0661\u0660")],
    ],
)
def test_relaxed_accuracy_has_the_published_values(answer: str, reference: str, value: float) -> None:
    options = {"tolerance": 0.05, "extract": "whole"}
    assert score("relaxed_accuracy", options, request(answer, reference)).value == value


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("anls", {"threshold": 0.5, "lengths": "raw"}),
        ("relaxed_accuracy", {"tolerance": 0.05}),
        ("multiple_choice", {"letters": "AB"}),
    ],
)
def test_a_million_accents_in_a_row_are_scored_in_time(name: str, options: dict[str, Any]) -> None:
    many = request("A" + "\u0301\u0323" * 500_000, "A")
    assert score(name, {**options, "extract": "whole"}, many).value == 0.0


@pytest.mark.parametrize("name", ["anls", "relaxed_accuracy", "multiple_choice", "exact_match"])
def test_empty_never_equals_empty(name: str) -> None:
    options = {
        "anls": {"threshold": 0, "lengths": "raw"},
        "relaxed_accuracy": {"tolerance": 0.05},
        "multiple_choice": {"letters": "AB"},
        "exact_match": {"ignore_case": False, "whole_response": True},
    }[name]
    assert score(name, {**options, "extract": "whole"}, request(" ", "A")) == Score(0.0, "empty answer")
    with pytest.raises(RewardError, match="no reference answer"):
        score(name, {**options, "extract": "whole"}, request("", "", " "))


@pytest.mark.parametrize(
    ("claims", "evidence", "precision", "recall", "f1"),
    [
        (["cat"], ["cat"], 1, 1, 1),
        (["Cat", "the cat", "cat."], ["cat"], 1, 1, 1),
        (["cat", "dog"], ["cat"], 1 / 2, 1, 2 / 3),
        (["cat"], ["cat", "dog"], 1, 1 / 2, 2 / 3),
        (["cat"] * 9 + ["dog"], ["cat", "cow"], 1 / 2, 1 / 2, 1 / 2),
        (["14"], ["page 14 of 2020"], 0, 0, 0),
        (["2014"], ["2014 dogs"], 0, 0, 0),
        (["1,000"], ["1000"], 1, 1, 1),
        (["1000.0", "10%"], [1000, 0.1], 1, 1, 1),
        (["10"], ["10%"], 0, 0, 0),
        (["5"], [".5"], 0, 0, 0),
        (["-5"], ["5"], 0, 0, 0),
        (["1,00"], ["100"], 0, 0, 0),
        (["cat"], ["category"], 0, 0, 0),
    ],
)
def test_grounding_has_precision_and_recall(
    claims: list[str], evidence: list[Any], precision: float, recall: float, f1: float
) -> None:
    expected = Score(pytest.approx(f1), "", {"precision": precision, "recall": recall})
    by_metadata = {"claims": "metadata:claimed", "evidence": "evidence"}
    assert score("grounding", by_metadata, request("", claimed=claims, evidence=evidence)) == expected
    by_response = {"claims": "json:entities", "evidence": "evidence"}
    assert score("grounding", by_response, request(json.dumps({"entities": claims}), evidence=evidence)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cat", "not JSON"),
        ("[]", "not a JSON object: an array"),
        *[(text, "field 'entities' is no array") for text in ("{}", '{"entities": "cat"}', '{"entities": [["cat"]]}')],
        *[(text, "no entity is claimed") for text in ('{"entities": []}', '{"entities": [" ", "."]}')],
    ],
)
def test_claims_that_are_none_score_0_with_a_reason(text: str, reason: str) -> None:
    found = score("grounding", {"claims": "json:entities", "evidence": "e"}, request(text, e=["cat"]))
    assert found.value == 0 and found.reason.startswith(reason)


@pytest.mark.parametrize("metadata", [{}, {"e": []}, {"e": [" "]}, {"e": "cat"}, {"e": [None]}])
def test_a_prompt_without_evidence_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"metadata"):
        score("grounding", {"claims": "json:c", "evidence": "e"}, request('{"c": ["cat"]}', **metadata))


def test_a_whole_number_is_one_entity_however_it_is_written() -> None:
    assert entity("1,234,567") == entity("1234567.0") == entity("+1234567") != entity("1234568")
    assert entity("9" * 5000) == "9" * 5000, "too long for arithmetic: compared as text"


def test_cost_falls_by_each_excess() -> None:
    options = {"target_tokens": 100, "latency_budget_ms": 200}
    assert score("cost", options, request("", tokens=100, latency_ms=200)).value == 1.0
    found = score("cost", options, request("", tokens=150, latency_ms=250))
    assert found == Score(0.25, "over budget: token, latency", {"token_excess": 0.5, "latency_excess": 0.25})
    assert score("cost", options, request("", tokens=10_000, latency_ms=0)).value == -1.0
    assert score("cost", {**options, "latency_budget_ms": None}, request("", tokens=150)).value == 0.5
    for wrong in ({}, {"latency_ms": float("nan")}, {"latency_ms": "9"}, {"latency_ms": -1}):
        with pytest.raises(RewardError, match="latency_ms"):
            score("cost", options, request("", **wrong))


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (60, 0.0), (61, -0.0125), (80, -0.25), (100, -0.5), (101, -0.5), (10**9, -0.5)]
)
def test_overlong_is_daposs_soft_penalty(tokens: int, value: float) -> None:
    options = {"max_tokens": 100, "buffer_tokens": 40, "penalty": 0.5}
    assert score("overlong", options, request("", tokens=tokens)).value == pytest.approx(value)


def test_a_response_that_was_cut_off_is_overlong() -> None:
    cut_off = RewardRequest(Response("", 5, is_truncated=True), (), {}, "")
    assert score("overlong", {"max_tokens": 100, "buffer_tokens": 40, "penalty": 2}, cut_off) == Score(-2.0, "cut off")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, 1.0) for text in ("<a>1</a>\n<b>2</b>", "<a></a><b>2</b> ")],
        *[(text, 0.0) for text in ("<a>1</a><b> </b>", "<b>2</b><a>1</a>", "<a><b>2</b></a>", "<a>1</a>x<b>2</b>")],
        *[(text, 0.0) for text in ("<a>1</b>2</a><b>", "<a>1</a><b>2</b><b>3</b>", "<a>1</a><a>1</a><b>2</b>")],
        *[(text, 0.0) for text in ("<a>1</a>", "<a>1</a><b>2</b> bye")],
    ],
)
def test_tags_are_a_users_own(text: str, value: float) -> None:
    assert score("format", {"tags": ["a", "b"]}, request(text)).value == value


@pytest.mark.parametrize(
    ("text", "fields", "object_", "fenced"),
    [
        ('{"a": 1, "b": "x"}', 1.0, 1.0, 1.0),
        *[(text, 0.0, 1.0, 1.0) for text in ('{"a": 1}', '{"a": 1, "b": "x", "c": 1}', '{"a": null, "b": "x"}')],
        *[(text, 0.0, 1.0, 1.0) for text in ('{"a": 1, "b": " "}', '{"a": 1, "b": []}')],
        *[(text, 0.0, 0.0, 0.0) for text in ('{"a": 1, "a": 2}', '{"a": NaN}', "[1]")],
        ('```json\n{"a": 1, "b": 2}\n```', 0.0, 0.0, 1.0),
    ],
)
def test_json_is_strict(text: str, fields: float, object_: float, fenced: float) -> None:
    assert score("format", {"json_fields": ["a", "b"]}, request(text)).value == fields
    assert score("format", {"preset": "json"}, request(text)).value == object_
    assert score("format", {"preset": "fenced_json"}, request(text)).value == fenced


PIXELS = {"response_scale": "pixels", "scale": "pixels"}
IOU = {"extract": "whole", "boxes": "wanted", "form": "xyxy", "min_iou": 0, **PIXELS}


@pytest.mark.parametrize(
    ("text", "wanted", "value", "precision", "recall"),
    [
        ("[0, 0, 10, 10]", [0, 0, 10, 10], 1.0, 1, 1),
        ("[[0, 0, 10, 10]]", [0, 0, 10, 5], 0.5, 1, 1),
        ("[5, 5, 15, 15]", [[0, 0, 10, 10]], 25 / 175, 1, 1),
        ("[10, 10, 20, 20]", [0, 0, 10, 10], 0.0, 0, 0),
        ('{"bbox_2d": [0, 0, 10, 10], "label": "cat"}', [0, 0, 10, 10], 1.0, 1, 1),
        ('```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]\n```', [0, 0, 10, 10], 1.0, 1, 1),
        ("Here it is:\n```\n[0, 0, 10, 10]\n```", [0, 0, 10, 10], 1.0, 1, 1),
        ('[{"bbox": [0, 0, 10, 10]}, {"box": [20, 20, 30, 30]}]', [[20, 20, 30, 30], [0, 0, 10, 10]], 1.0, 1, 1),
        ("[[0,0,10,10], [20,20,30,30]]", [0, 0, 10, 10], 0.5, 0.5, 1),
        ("[0,0,10,10]", [[0, 0, 10, 10], [20, 20, 30, 30]], 0.5, 1, 0.5),
        ("[[0,0,10,10], [0,0,10,10]]", [0, 0, 10, 10], 0.5, 0.5, 1),
        # greedy, in order of the response or of size, would take 0.5 + 0: the best matching has 1/3 + 1/2
        ("[[0,0,10,10], [0,0,10,4]]", [[0, 0, 10, 5], [0, 5, 10, 15]], (0.8 + 1 / 3) / 2, 1, 1),
    ],
)
def test_boxes_are_matched_once_each(
    text: str, wanted: list[Any], value: float, precision: float, recall: float
) -> None:
    found = score("iou", IOU, request(text, wanted=wanted))
    assert found.value == pytest.approx(value) and found.breakdown == {"precision": precision, "recall": recall}


@pytest.mark.parametrize(
    "text",
    [
        *("", "cat", "[]", "[0, 0, 10]", "[0, 0, 10, 10, 10]", "[10, 10, 0, 0]", "[0, 0, 0, 10]", "[-1, 0, 10, 10]"),
        *("[0, 0, 1e9, 10]", "[0, 0, 1e999, 10]", "[0, 0, NaN, 10]", "[0, 0, true, 10]", '[0, 0, "x", 10]', "[[0, 0]]"),
        *("```json\n[0, 0, 10, 10]", "```\n[0, 0, 9, 9]\n``` or ```\n[0, 0, 10, 10]\n```"),
        *("[[0, 0, 10, 10], 7]", '{"cat": [0, 0, 10, 10]}', "null", "[null]", "[{}]", "(0, 0, 9, 9)", "[[[0,0,9,9]]]"),
        *(f"[0, 0, {'9' * 5000}, 10]", "[" * 100_000, json.dumps([[0, 0, 10, 10]] * 201), "[\u0660, 0, 10, 10]"),
    ],
)
def test_malformed_boxes_score_0_with_a_reason(text: str) -> None:
    found = score("iou", IOU, request(text, wanted=[0, 0, 10, 10]))
    assert found.value == 0.0 and found.reason


def test_boxes_come_in_forms_and_scales() -> None:
    wanted = [10, 20, 30, 60]  # of an image of 100 x 200
    size = {"width": 100, "height": 200}
    thousandths = {**IOU, "response_scale": "thousandths"}
    assert score("iou", thousandths, request("[100, 100, 300, 300]", wanted=wanted, **size)).value == pytest.approx(1)
    relative = {**IOU, "response_scale": "relative"}
    assert score("iou", relative, request("[0.1, 0.1, 0.3, 0.3]", wanted=wanted, **size)).value == pytest.approx(1)
    assert score("iou", relative, request("[0.1, 0.1, 0.3, 1.3]", wanted=wanted, **size)).reason
    corner_and_size = {**IOU, "form": "xywh"}
    assert score("iou", corner_and_size, request("[10, 20, 20, 40]", wanted=[10, 20, 20, 40])).value == 1.0
    both = {**IOU, "response_scale": "relative", "scale": "thousandths"}
    assert score("iou", both, request("[0.1, 0.1, 0.3, 0.3]", wanted=[100, 100, 300, 300])).value == pytest.approx(1)
    with pytest.raises(RewardError, match="size is not known"):
        score("iou", relative, request("[0.1, 0.1, 0.3, 0.3]", wanted=wanted))
    with pytest.raises(RewardError, match="metadata.wanted has a box without area"):
        score("iou", IOU, request("[0, 0, 1, 1]", wanted=[3, 3, 3, 3]))
    with pytest.raises(RewardError, match="no 'wanted'"):
        score("iou", IOU, request("[0, 0, 1, 1]"))


def test_boxes_in_pixels_of_the_scaled_image_are_compared_with_those_of_the_file() -> None:
    """A photo of 1920 x 1080, seen as 644 x 364: the box in those pixels is worth 1, that of the file is not."""
    shown = {**IOU, "response_scale": "shown_pixels"}
    wanted, sizes = [1000, 600, 1400, 1000], {"image_sizes": [[1920, 1080]], "shown_image_sizes": [[644, 364]]}
    box = [1000 * 644 / 1920, 600 * 364 / 1080, 1400 * 644 / 1920, 1000 * 364 / 1080]
    assert score("iou", shown, request(str(box), wanted=wanted, **sizes)).value == pytest.approx(1)
    assert score("iou", shown, request(str(wanted), wanted=wanted, **sizes)).value < 0.1
    thousandths = {**shown, "scale": "thousandths"}
    in_thousandths = [1000 / 1.92, 600 / 1.08, 1400 / 1.92, 1000 / 1.08]
    assert score("iou", thousandths, request(str(box), wanted=in_thousandths, **sizes)).value == pytest.approx(1)
    both = {**shown, "scale": "shown_pixels"}
    assert score("iou", both, request(str(box), wanted=box)).value == 1
    with pytest.raises(RewardError, match="metadata has no shown_image_sizes, which runs of models that scale"):
        score("iou", shown, request(str(box), wanted=wanted, width=1920, height=1080))


def test_an_images_size_is_that_of_the_prompts_first_image_upright() -> None:
    image = Image.new("RGB", (200, 100))
    exif = image.getexif()
    exif[0x0112] = 6  # shown as 100 x 200
    relative, plain = {**IOU, "response_scale": "relative"}, request("[0.1, 0.1, 0.3, 0.3]", wanted=[10, 20, 30, 60])
    asked = replace(plain, prompt_images=(encoded(image, "JPEG", exif=exif), encoded(image)))
    assert score("iou", relative, asked).value == pytest.approx(1)
    with pytest.raises(RewardError, match="cannot be opened"):
        score("iou", relative, replace(plain, prompt_images=(b"no image",)))


def test_a_pair_below_the_least_iou_counts_nothing() -> None:
    strict = {**IOU, "min_iou": 0.5}
    assert score("iou", strict, request("[0,0,10,5]", wanted=[0, 0, 10, 10])).value == 0.5
    assert score("iou", strict, request("[0,0,10,4]", wanted=[0, 0, 10, 10])).value == 0.0


LANGUAGE = {"language": "en", "among": ["en", "de", "fr", "zh"], "min_letters": 6}


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("The cat sits on the mat and looks at the fish.", 1, 1),
        ("Die Katze sitzt auf der Matte und sieht den Fisch.", 0, 0),
        ("\u732b\u5750\u5728\u57ab\u5b50\u4e0a\u770b\u9c7c\u3002", 0, 0),
        ("The cat sits on the mat here. Die Katze sitzt auf der Matte.", 0.4, 0.6),
        (r"$\frac{1}{2}$ `die Katze sitzt auf der Matte`", 1, 1),
        ("42", 1, 1),
        ("", 1, 1),
        ("\ud800 The cat sits on the mat.", 1, 1),
    ],
)
def test_language_is_the_share_of_letters_in_it(text: str, low: float, high: float) -> None:
    assert low <= score("language", LANGUAGE, request(text)).value <= high


def test_another_language_is_named() -> None:
    found = score("language", LANGUAGE, request("Die Katze sitzt auf der Matte und sieht den Fisch."))
    assert found.reason == "also german"


def drawn(text: str, kind: str = "PNG") -> bytes:
    image = Image.new("RGB", (400, 100), "white")
    ImageDraw.Draw(image).text((20, 20), text, fill="black", font=ImageFont.load_default(40))
    return encoded(image, kind)


def image_request(*images: bytes, references: tuple[str, ...] = (), prompt: str = "") -> RewardRequest:
    return RewardRequest(Response("", 1, False, images), references, {}, prompt)


def test_the_text_of_an_image_is_read() -> None:
    options = {"layout": "page", "target": "reference", "exact": False, "frame_stride": 1, "num_threads": 1}
    ocr, exact = (build_function("ocr", {**options, "exact": e}, TOOLS) for e in (False, True))
    shown = drawn("New Haven 42")
    assert evaluate(ocr, image_request(shown, references=("new haven 42",))).value == 1.0
    assert evaluate(exact, image_request(drawn("New Haven 42", "JPEG"), references=("NEW HAVEN 42",))).value == 1.0
    assert evaluate(ocr, image_request(shown, references=("Haven",))).value == 1.0
    assert evaluate(exact, image_request(shown, references=("Haven",))).value == 0.0
    assert evaluate(ocr, image_request(shown, references=("New Heaven 42",))).value == pytest.approx(1 - 1 / 11)
    assert evaluate(ocr, image_request(shown, references=("q",))).value == 0.0
    assert evaluate(ocr, image_request(drawn(""), references=("New",))) == Score(0.0, "no text in the image")
    assert evaluate(ocr, image_request(shown, drawn(""), references=("Haven",))).value == 0.5
    quoted = build_function("ocr", {**options, "target": "quoted_prompt", "frame_stride": 2}, TOOLS)
    assert evaluate(quoted, image_request(shown, drawn(""), prompt='A sign that says "New Haven 42".')).value == 1.0
    for unfit, message in [
        (image_request(references=("a",)), "no image"),
        (image_request(b"junk", references=("a",)), "of no known kind"),
        (image_request(shown[:200], references=("a",)), "cannot be opened"),
        (image_request(encoded(Image.new("RGB", (1, 2000))), references=("a",)), "1 x 2000: too narrow"),
        (image_request(shown), "no reference"),
        (image_request(shown, references=(" ",)), "no reference"),
    ]:
        with pytest.raises(RewardError, match=message):
            evaluate(ocr, unfit)
    with pytest.raises(RewardError, match="no text in double quotes"):
        evaluate(quoted, image_request(shown, prompt='A sign that says "'))


def test_an_image_of_one_line_is_read_as_it_is() -> None:
    options = {"target": "reference", "exact": True, "frame_stride": 1, "num_threads": 1}
    line, page = (build_function("ocr", {**options, "layout": layout}, TOOLS) for layout in ("line", "page"))
    texts = ("42", "07", "New Haven 42")
    requests = [image_request(one_line(text), references=(text,)) for text in texts]
    assert [evaluate(line, request).value for request in requests] == [1.0, 1.0, 1.0]
    assert evaluate(line, image_request(one_line("43"), references=("42",))).value == 0.0
    assert seconds(lambda: evaluate(line, requests[0])) < 0.5 * seconds(lambda: evaluate(page, requests[0]))


def one_line(text: str) -> bytes:
    """White on black, as high as the text is."""
    font = ImageFont.load_default(12)
    image = Image.new("L", (math.ceil(font.getlength(text)) + 2, 16), 0)
    ImageDraw.Draw(image).text((image.width / 2, 8), text, fill=255, font=font, anchor="mm")
    return encoded(image)


def seconds(call: Callable[[], object]) -> float:
    """The shortest of three calls."""
    return min(timeit.repeat(call, number=1, repeat=3))


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"language": "lingua", "ocr": "rapidocr"}[name]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"mobula.rewards.functions.{name}", raising=False)
    with pytest.raises(ValueError, match=rf"needs '{package}', which is not installed: pip install 'mobula\[{name}\]'"):
        build_function(name, {}, Tools(TOOLS.isolated, "cpu", "float32"))
