"""The reward of digit_list: credit for each statement in its place, and none to be had by saying more."""

from __future__ import annotations

from itertools import product

import pytest

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.examples.digits.digit_list import digit_list
from mobula.rewards.contract import RewardRequest, Score, evaluate

A, B, C = "Picture A is the digit 7.", "Picture B is the digit 3.", "Picture C is the digit 0."
SUM = "The sum is 10."
RIGHT = "\n".join([A, B, C, SUM])
WRONG_A, WRONG_B, WRONG_C = A.replace("7", "8"), B.replace("3", "4"), C.replace("0", "1")


def score(*sentences: str, separator: str = "\n", references: tuple[str, ...] = ("10", RIGHT)) -> Score:
    text = separator.join(sentences)
    request = RewardRequest(Response(text, num_tokens=1, is_truncated=False), references, {}, "")
    return evaluate(digit_list, request)


@pytest.mark.parametrize("separator", ["\n", " ", "\n\n", " \n "])
def test_the_whole_truth_scores_1(separator: str) -> None:
    assert score(A, B, C, SUM, separator=separator) == Score(1.0, "", {"digits": 1.0, "sum": 1.0, "extra": 0.0})


@pytest.mark.parametrize(
    ("sentences", "num_right"),
    [
        ((A, B, WRONG_C, SUM), 3),
        ((A, B, C, "The sum is 11."), 3),
        ((WRONG_A, WRONG_B, C, "The sum is 12."), 1),
        # cut off
        ((A, B), 2),
        ((A, "Picture B is the dig"), 0),  # a piece of a sentence states nothing: another sentence
        ((A, B, C, "The sum is 1"), 2),
        (("",), 0),
        ((" \n",), 0),
        # a sentence is missing: what follows is not in its place
        ((A, C, SUM), 2),
        ((B, C, SUM), 1),
        ((A, B, C), 3),
        ((SUM,), 1),
        # another order
        ((B, A, C, SUM), 2),
        ((SUM, A, B, C), 0),
        ((A, SUM, B, C), 1),
        # the same image twice
        ((A, A, B, C, SUM), 1),
        ((A, B, B, SUM), 3),
        ((A, A.replace("7", "3"), C, SUM), 3),
    ],
)
def test_each_statement_in_its_place_has_a_fourth_of_the_credit(sentences: tuple[str, ...], num_right: int) -> None:
    assert score(*sentences).value == num_right / 4


@pytest.mark.parametrize(
    ("sentences", "num_right"),
    [
        ((A, B, C, SUM, SUM), 2),  # no sum, as there are two, and one sentence too many
        ((A, B, C, "The sum is 11.", SUM), 2),
        ((A, B, C, *(f"The sum is {n}." for n in range(20))), 0),
        ((A, B, C, "Picture D is the digit 0.", SUM), 3),
        ((A, B, C, SUM, "Picture D is the digit 0."), 2),
        ((*(A.replace("7", str(n)) for n in range(10)), SUM), 0),
        ((A, B, C, SUM, "I am sure."), 2),
        ((A, B, C, "So: " + SUM), 2),
        (("Well.", A, B, C, SUM), 0),
        ((f"{A[:-1]} or 8.", B, C, SUM), 2),
        ((A[:-1], B, C, SUM), 2),  # without its full stop
        ((A.lower(), B, C, SUM), 2),
        ((A.replace("7", "07"), B, C, SUM), 2),
        ((A.replace("7", "٧"), B, C, SUM), 2),
        ((A, B, C, "The sum is 010."), 3),
        ((A, B, C, "The sum is -10."), 2),
        ((A + B, C, SUM), 0),
        ((A, B, C, SUM) * 200, 0),
        (("." * 10_000,), 0),
    ],
)
def test_more_words_never_earn_more(sentences: tuple[str, ...], num_right: int) -> None:
    assert score(*sentences).value == num_right / 4


def test_no_answer_of_up_to_five_sentences_beats_the_truth() -> None:
    sentences_used = (A, B, C, SUM, WRONG_A, "The sum is 11.", "Hm.")
    best = [
        sentences
        for length in range(6)
        for sentences in product(sentences_used, repeat=length)
        if score(*sentences).value >= 1
    ]
    assert best == [(A, B, C, SUM)]


def test_a_sentence_too_many_always_costs() -> None:
    sentences_used = (A, B, C, SUM, WRONG_A, "The sum is 11.", "Hm.")
    for extra, place in product(sentences_used, range(5)):
        sentences = [A, B, C, SUM]
        sentences.insert(place, extra)
        assert score(*sentences).value <= 3 / 4


def test_the_reason_and_the_parts_name_what_is_wrong() -> None:
    found = score(A, WRONG_B, C, SUM, "Hm.")
    assert found.reason == "1 of 3 digits wrong or out of place, sum wrong or not last, 1 further sentences"
    assert found.breakdown == {"digits": 2 / 3, "sum": 0.0, "extra": 1.0}


@pytest.mark.parametrize("references", [("10",), ("10", A), ("10", SUM), (f"{A}\nHm.\n{SUM}",), ("",)])
def test_a_prompt_without_such_a_reference_is_refused(references: tuple[str, ...]) -> None:
    with pytest.raises(RewardError, match="no reference"):
        score(A, references=references)
