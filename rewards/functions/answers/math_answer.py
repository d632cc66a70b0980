r"""Exact answer: 1 if the response's answer equals a reference as mathematics, else 0."""

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
from mobula.rewards.isolation.calls import call_each, failure
from mobula.rewards.tools import Tools

MAX_ANSWER_CHARS = 1000  # an answer longer than this, and than twice its reference, is no answer; parsing it would be
_EQUIVALENT = "mobula.rewards.functions.parsing.math_verification:equivalent"

_SET_OF_PAIRS = re.compile(r"\\\{\s*(\(.*\))\s*\\\}")

_Question = tuple[tuple[str, str], ...]  # answer and reference, which only computer algebra can compare


class MathAnswer:
    r"""Compares the answer with each reference: plain ones at once, the rest by math-verify in isolated processes.

    One of two options selects where the answer stands. `require_boxed`: in the last balanced box; where it is false,
    a response without a box is its own answer as a whole, and a number somewhere in its prose never counts. `extract`:
    any way of `rewards.functions.parsing.extraction`, such as `json:answer`; a box within what was found is opened.

    A unit may be left out or added, but not exchanged for another; nothing is converted. Words that change what a
    number says ("5 or more", "not 5") make it no answer.
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
        question = self._look(request)
        if isinstance(question, Score):
            return question
        return _compared(self._isolated.call(_EQUIVALENT, question))

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Undecided answers go to the processes side by side: one that hangs costs its own timeout and no other's."""
        found = [self._look_or_fail(request) for request in requests]
        questions = [question for question in found if isinstance(question, tuple)]
        verdicts = iter(
            call_each(self._isolated, _EQUIVALENT, [(question,) for question in questions], _compared)
            if questions
            else ()
        )
        return [next(verdicts) if isinstance(question, tuple) else question for question in found]

    def _look_or_fail(self, request: RewardRequest) -> Outcome | _Question:
        try:
            return self._look(request)
        except RewardError as error:
            return failure(error)

    def _look(self, request: RewardRequest) -> Score | _Question:
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
        if _breaks_out(answer):
            return Score(0.0, "unbalanced braces")
        return _compare(answer, references)


def _breaks_out(answer: str) -> bool:
    """Whether an answer would leave the box that it is parsed in."""
    if "{" not in answer and "}" not in answer and "\\" not in answer:
        return False
    return last_boxed(f"\\boxed{{{answer}}}") != answer


def _compare(answer: str, references: tuple[str, ...]) -> Score | _Question:
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
    """True, or the two values that computer algebra has to compare; False or the reason where they are not equal."""
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
        answer = pairs[1]  # the pairs of a set and of a list are the same, in any order
    return why_no_value(answer, reference) or why_other_words(answer, reference) or (answer, reference)


def _compared(verdict: tuple[bool, str]) -> Score:
    equals, reason = verdict
    return Score(float(equals), reason)
