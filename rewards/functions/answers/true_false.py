"""True or false: 1 if the response judges a statement correctly, else 0."""

from __future__ import annotations

import re
from typing import Literal

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import RequestExtractor
from mobula.rewards.functions.parsing.references import given_references
from mobula.rewards.tools import Tools

# `no` is an answer only at the end of a clause: "no circle is red" answers nothing.
_ANSWERS = re.compile(
    r"(?P<not>\b(?:not|never|isn't|is not|neither|nor|cannot be|can't be)\s+(?:\w+\s+)?)?"
    r"\b(?P<word>true|false|yes|no(?=\s*(?:[.,;:!)*\"']|$)))\b",
    re.IGNORECASE | re.MULTILINE,
)
_HOLDS = {"true": True, "yes": True, "false": False, "no": False}
_MAX_CHARS = 100_000


class TrueFalse:
    """Reads `true`, `yes`, `false` and `no` as separate words; "not true" is false, and "not false" is true.

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
    """Returns whether a text says true or false; None if it says neither or both.

    Example:
        >>> read_truth("It is not true."), read_truth("unknown"), read_truth("Yes: true.")
        (False, None, True)
    """
    if len(text) > _MAX_CHARS:
        return None
    answers = {_HOLDS[match["word"].lower()] is not bool(match["not"]) for match in _ANSWERS.finditer(text)}
    return answers.pop() if len(answers) == 1 else None


def vlm_gym_truth(text: str) -> bool:
    """Reads like vlm-gym, substrings included: "it is not true" is true, "unknown" is false because of "no"."""
    text = text.lower()
    for yes, no in (("true", "false"), ("yes", "no")):
        if (yes in text) is not (no in text):
            return yes in text
    return False
