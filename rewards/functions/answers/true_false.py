"""True or false: 1 if the response judges a statement correctly, else 0."""

from __future__ import annotations

import re
from typing import Literal

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import RequestExtractor
from mobula.rewards.functions.parsing.references import given_references
from mobula.rewards.functions.parsing.unicode_latex import plain_forms
from mobula.rewards.tools import Tools

# `no` is an answer only at the end of a clause: "no circle is red" answers nothing.
_ANSWERS = re.compile(r"\b(?:(true|yes)|(false|no(?=\s*(?:[)*\"']|$))))\b", re.IGNORECASE)
_CLAUSES = re.compile(r"([^,.;:!?\n]*)([,.;:!?\n]|$)")
_NEGATIONS = re.compile(
    r"^\W*nor\b|\b(?:not(?! only)|\w+n't|cannot|never|neither|hardly|scarcely|barely|no (?:means|way|circumstances)"
    r"|far from|anything but|unlikely|doubt(?:s|ed|ful)?|den(?:y|ies|ied))\b",
    re.IGNORECASE,
)
_RETRACTION = re.compile(
    r"\b(?:wait|actually|scratch that|on second thoughts?|correction|mistaken|never ?mind|(?:it|that) back)\b",
    re.IGNORECASE,
)
_MAX_CHARS = 100_000


class TrueFalse:
    """Reads `true`, `yes`, `false` and `no` as separate words; "hardly true" is false, and "not false" is true.

    A response with both answers, or neither, has no answer. `extract` selects the part of the response with the answer
    (`rewards.functions.parsing.extraction`). `compat=vlm_gym` reads like vlm-gym's NLVR2, inside words too: first
    `true` against `false`, then `yes` against `no`; undecided is false.

    Raises:
        RewardError: no reference is true or false.
    """

    def __init__(self, tools: Tools, *, extract: str, compat: Literal["none", "vlm_gym"]) -> None:
        if compat not in ("none", "vlm_gym"):
            raise ValueError(f"compat={compat!r} is unknown: use none or vlm_gym")
        self._extract = RequestExtractor(extract)
        self._is_compatible = compat == "vlm_gym"

    def __call__(self, request: RewardRequest) -> Score:
        truths = {truth for truth in map(read_truth, given_references(request.references)) if truth is not None}
        if len(truths) != 1:
            raise RewardError(f"the references {request.references!r} do not say one of True and False: write one")
        [truth] = truths
        if self._is_compatible:
            return Score(float(vlm_gym_truth(request.response.text) is truth))
        text, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        answer = read_truth(text)
        return Score(float(answer is truth), "" if answer is not None else "says neither or both of true and false")


def read_truth(text: str) -> bool | None:
    """Returns whether a text says true or false; None if it says neither or both, asks, or takes its answer back.

    Example:
        >>> read_truth("It is hardly true."), read_truth("unknown"), read_truth("Yes: true."), read_truth("Is it true?")
        (False, None, True, None)
    """
    if len(text) > _MAX_CHARS:
        return None
    truths: set[bool] = set()
    for clause, end in _CLAUSES.findall(plain_forms(text)):
        if truths and _RETRACTION.search(clause):
            return None
        answers = [] if end == "?" else list(_ANSWERS.finditer(clause))
        truths |= {bool(answer[1]) is not is_negated(clause[: answer.start()]) for answer in answers}
        if not answers and end == "," and is_negated(clause[-10:]) and clause.split()[-1:] != ["no"]:
            return None  # "It is not, in my view, true"
    return truths.pop() if len(truths) == 1 else None


def is_negated(clause: str) -> bool:
    """Whether a clause denies what follows it: "I do not think that it is" does, two negations do not."""
    return len(_NEGATIONS.findall(clause)) % 2 == 1


def vlm_gym_truth(text: str) -> bool:
    """Reads like vlm-gym, substrings included: "it is not true" is true, "unknown" is false because of "no"."""
    text = text.lower()
    for yes, no in (("true", "false"), ("yes", "no")):
        if (yes in text) is not (no in text):
            return yes in text
    return False
