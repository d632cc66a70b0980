r"""Exact answer: 1 if the response's `\boxed{...}` equals a reference as mathematics, else 0."""

from __future__ import annotations

from cluster.errors import RewardError
from rewards.contract import RewardRequest, Score
from rewards.functions.boxed import last_boxed
from rewards.functions.exact import decide, why_no_value
from rewards.tools import Tools

MAX_ANSWER_CHARS = 1000  # an answer longer than this, and than twice its reference, is no answer; parsing it would be
_EQUIVALENT = "rewards.functions.math_verification:equivalent"


class MathAnswer:
    r"""Compares the last balanced box with each reference: plain answers at once, the rest by math-verify in a process.

    Units are ignored, as math-verify does. Without `require_boxed`, a response without a box is its own answer as a
    whole; a number somewhere in its prose never counts.
    """

    def __init__(self, tools: Tools, *, require_boxed: bool) -> None:
        if not isinstance(require_boxed, bool):
            raise ValueError(f"require_boxed={require_boxed!r} is neither true nor false")
        self._isolated = tools.isolated
        self._require_boxed = require_boxed

    def __call__(self, request: RewardRequest) -> Score:
        references = tuple(last_boxed(reference) or reference for reference in request.references)
        if not any(reference.strip() for reference in references):
            raise RewardError("the prompt has no reference answer to compare with")
        answer = last_boxed(request.response.text)
        if answer is None and self._require_boxed:
            return Score(0.0, "no \\boxed{} answer")
        answer = (request.response.text if answer is None else answer).strip()
        if not answer:
            return Score(0.0, "empty answer")
        if len(answer) > max(MAX_ANSWER_CHARS, 2 * max(map(len, references))):
            return Score(0.0, f"answer of {len(answer)} characters")
        if last_boxed(f"\\boxed{{{answer}}}") != answer:  # it would break out of the box it is parsed in
            return Score(0.0, "unbalanced braces")
        return self._compare(answer, references)

    def _compare(self, answer: str, references: tuple[str, ...]) -> Score:
        verdicts = {reference: decide(answer, reference) for reference in references}
        if True in verdicts.values():
            return Score(1.0)
        refusals = {r: why_no_value(answer, r) for r, verdict in verdicts.items() if verdict is None}
        undecided = tuple(reference for reference, refusal in refusals.items() if not refusal)
        if not undecided:
            return Score(0.0, next(filter(None, refusals.values()), "another value"))
        equals, reason = self._isolated.call(_EQUIVALENT, answer, undecided)
        return Score(float(equals), reason)
