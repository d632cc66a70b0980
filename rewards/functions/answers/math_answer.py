r"""Math answer: 1 if the answer of the response is mathematically equal to a reference, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, RewardRequest, Score
from mobula.rewards.functions.parsing.answer_words import TALK, why_other_words
from mobula.rewards.functions.parsing.extraction import RequestExtractor
from mobula.rewards.functions.parsing.latex_boxes import last_boxed
from mobula.rewards.functions.parsing.named_forms import other_primes, without_option
from mobula.rewards.functions.parsing.plain_answers import decide, normalise, why_no_value
from mobula.rewards.functions.parsing.references import check_true_or_false, given_references
from mobula.rewards.functions.parsing.units import same_unit, spelled, split_unit
from mobula.rewards.isolation.process_pool import call_each, failure
from mobula.rewards.tools import Tools

MAX_ANSWER_CHARS = 1000  # longer answers are refused, unless a reference is half as long: parsing them takes too long
_EQUIVALENT = "mobula.rewards.functions.parsing.math_verification:equivalent"

_SET_OF_PAIRS = re.compile(r"\\\{\s*(\(.*\))\s*\\\}")

_Undecided = tuple[tuple[str, str], ...]  # (answer, reference) pairs that only computer algebra can compare


class MathAnswer:
    r"""Compares the answer with each reference: plain answers directly, others by math-verify in isolated processes.

    One of two options selects the part of the response with the answer. `require_boxed`: true is the last balanced box;
    false takes a response without a box as a whole, so that a number in prose does not count. `extract`: a method of
    `rewards.functions.parsing.extraction`, such as `json:answer`; a box in the extracted text is opened.

    A unit may be missing or added, but not replaced; units are not converted. Words that change the meaning of a
    number ("5 or more", "not 5") make the answer wrong.
    """

    def __init__(self, tools: Tools, *, require_boxed: bool | None = None, extract: str | None = None) -> None:
        if require_boxed is not None and extract is None:
            check_true_or_false(require_boxed=require_boxed)
            extract = "boxed" if require_boxed else "whole"
        elif require_boxed is not None or extract is None:
            raise ValueError(f"require_boxed={require_boxed!r} and extract={extract!r}: set exactly one of the two")
        self._isolated = tools.isolated
        self._extract = RequestExtractor(extract)

    def __call__(self, request: RewardRequest) -> Score:
        verdict = self._decide(request)
        if isinstance(verdict, Score):
            return verdict
        return _compared(self._isolated.call(_EQUIVALENT, verdict))

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Compares undecided answers concurrently in the processes; a hanging comparison costs only its own timeout."""
        verdicts: list[Outcome | _Undecided] = []
        for request in requests:
            try:
                verdicts.append(self._decide(request))
            except RewardError as error:
                verdicts.append(failure(error))
        calls = [(verdict,) for verdict in verdicts if isinstance(verdict, tuple)]
        compared = iter(call_each(self._isolated, _EQUIVALENT, calls, _compared) if calls else ())
        return [next(compared) if isinstance(verdict, tuple) else verdict for verdict in verdicts]

    def _decide(self, request: RewardRequest) -> Score | _Undecided:
        given = given_references(request.references)
        references = tuple(last_boxed(reference) or reference for reference in given)
        answer, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        boxed = last_boxed(answer) if "\\boxed" in answer else None
        answer = answer if boxed is None else boxed.strip()
        if not answer:
            return Score(0.0, "empty answer")
        if len(answer) > max(MAX_ANSWER_CHARS, 2 * max(map(len, references))):
            return Score(0.0, f"answer of {len(answer)} characters")
        has_syntax = "{" in answer or "}" in answer or "\\" in answer
        if has_syntax and last_boxed(f"\\boxed{{{answer}}}") != answer:  # it would end the box that it is parsed in
            return Score(0.0, "unbalanced braces")
        return _compare(answer, references)


def _compare(answer: str, references: tuple[str, ...]) -> Score | _Undecided:
    answer = normalise(answer)
    undecided, refusals = [], []
    for reference in map(normalise, references):
        verdict = _equal(answer, reference)
        if verdict is True:
            return Score(1.0)
        if isinstance(verdict, tuple):
            undecided.append(verdict)
        else:
            refusals.append(verdict or "another value")
    return tuple(undecided) if undecided else Score(0.0, refusals[0])


def _equal(answer: str, reference: str) -> bool | str | tuple[str, str]:
    """Returns True, False or the reason of an inequality, or the two values that computer algebra has to compare."""
    answer, reference = without_option(answer, reference)
    verdict = decide(answer, reference)
    if verdict is not None:
        return verdict
    if other_primes(answer, reference):
        return "another number of primes"
    ours, theirs = split_unit(answer, TALK), split_unit(reference, TALK)
    if ours.unit and theirs.unit and not same_unit(ours.unit, theirs.unit):
        return f"{spelled(ours.unit)} instead of {spelled(theirs.unit)}"
    if ours.unit or (theirs.unit and not theirs.ambiguous):
        answer, reference = normalise(ours.value), normalise(theirs.value)
        verdict = decide(answer, reference)
        if verdict is not None:
            return verdict
    if reference.startswith("(") and (pairs := _SET_OF_PAIRS.fullmatch(answer)):
        answer = pairs[1]  # a set of pairs equals a list of the same pairs, in any order
    return why_no_value(answer, reference) or why_other_words(answer, reference) or (answer, reference)


def _compared(verdict: tuple[bool, str]) -> Score:
    equals, reason = verdict
    return Score(float(equals), reason)
