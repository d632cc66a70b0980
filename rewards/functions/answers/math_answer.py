r"""Math answer: 1 if the answer of the response is mathematically equal to a reference, else 0."""

from __future__ import annotations

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import RequestExtractor
from mobula.rewards.functions.parsing.latex_boxes import closing_boxes
from mobula.rewards.functions.parsing.math_equality import equals
from mobula.rewards.functions.parsing.references import check_true_or_false, given_references
from mobula.rewards.tools import Tools

MAX_ANSWER_CHARS = 1000  # longer answers are refused, unless a reference is half as long


class MathAnswer:
    r"""Compares the answer with each reference: the types first (list, tuple, set, interval, equations, quantity,
    expression, text), then the values.

    One of two options selects the part of the response with the answer. `require_boxed`: true is the last balanced box,
    or the list of boxes that ends the response (`\boxed{2}, \boxed{3}`); false takes a response without a box as a
    whole, so that a number in prose does not count. `extract`: a method of `rewards.functions.parsing.extraction`, such
    as `json:answer`; a box in the extracted text is opened.

    A unit may be missing or added, but not replaced; units are not converted. Words that change the meaning of a
    number ("5 or more", "not 5") make the answer wrong.
    """

    def __init__(self, tools: Tools, *, require_boxed: bool | None = None, extract: str | None = None) -> None:
        if require_boxed is not None and extract is None:
            check_true_or_false(require_boxed=require_boxed)
            extract = "boxed" if require_boxed else "whole"
        elif require_boxed is not None or extract is None:
            raise ValueError(f"require_boxed={require_boxed!r} and extract={extract!r}: set exactly one of the two")
        self._is_boxed = extract == "boxed"
        self._extract = RequestExtractor(extract)

    def __call__(self, request: RewardRequest) -> Score:
        references = [closing_boxes(text) or text for text in given_references(request.references)]
        answer, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        boxed = closing_boxes(request.response.text if self._is_boxed else answer)
        answer = answer if boxed is None else boxed.strip()
        if not answer:
            return Score(0.0, "empty answer")
        if len(answer) > max(MAX_ANSWER_CHARS, 2 * max(map(len, references))):
            return Score(0.0, f"answer of {len(answer)} characters")
        is_equal = any(equals(answer, reference) for reference in references)
        return Score(float(is_equal), "" if is_equal else "another value")
