"""Exact match: 1 if the response equals a reference, else 0."""

from __future__ import annotations

import re
from functools import lru_cache

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import RequestExtractor
from mobula.rewards.functions.parsing.references import check_true_or_false, given_references
from mobula.rewards.functions.parsing.unicode_latex import plain_forms
from mobula.rewards.tools import Tools

# A digit at an alias's edge must be the number's edge as well: 7 is not in -7, 3.7, 7.5, 7/8, 1,007, 7:30 or 7%.
# Chinese and Japanese write no spaces: 7 is in 答案是7个, but 京 is not in 东京.
_IN_WORD = r"[^\W\u3040-\u30ff\u3400-\u9fff]"
_NUMBER_BEGINS = re.compile(rf"(?<!{_IN_WORD})" r"(?<![-+.\N{MINUS SIGN}\N{EN DASH}])(?<![0-9][,:/^*])")
_NUMBER_ENDS = re.compile(r"(?![-+.,:/^*\N{EN DASH}][0-9])(?!\s?%)" rf"(?!{_IN_WORD})")
# A word at the edge must be complete: Germany is not in wrong-Germany, red not in red-haired.
_WORD_BEGINS = re.compile(r"(?<!\w)(?<!\w-)")
_WORD_ENDS = re.compile(r"(?!-\w)(?!\w)")

_MAX_SCANNED = 32  # occurrences that are checked one by one before a pattern is compiled


class ExactMatch:
    """Compares text with the references, which are aliases of the right answer; runs of white space are one space.

    `ignore_case` folds upper and lower case. With `whole_response` the extracted text must equal the answer. Without it
    the text may contain the answer anywhere at boundaries of words ("cat" is not in "concatenate" or "cat-like") and
    numbers ("7" is not in "-7", "3.7" or "7/8"), and other text is ignored: "not red" contains "red". `extract`
    selects the part with the answer (`mobula.rewards.functions.parsing.extraction`); None is `whole`.
    """

    def __init__(self, tools: Tools, *, ignore_case: bool, whole_response: bool, extract: str | None = None) -> None:
        check_true_or_false(ignore_case=ignore_case, whole_response=whole_response)
        self._extract = RequestExtractor("whole" if extract is None else extract)
        self._ignore_case = ignore_case
        self._whole_response = whole_response

    def __call__(self, request: RewardRequest) -> Score:
        references = given_references(request.references)
        answer, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        answer, aliases = fold(answer, self._ignore_case), _aliases(references, self._ignore_case)
        if self._whole_response:
            return Score(float(answer in aliases))
        return Score(float(any(_stands_in(answer, alias) for alias in aliases)))


def fold(text: str, ignore_case: bool) -> str:
    """Strips the text, folds white space to single spaces, rewrites full-width forms; `ignore_case` also folds case."""
    text = " ".join(plain_forms(text).split())
    return text.casefold() if ignore_case else text


@lru_cache(maxsize=4096)  # a group's responses share their references
def _aliases(references: tuple[str, ...], ignore_case: bool) -> tuple[str, ...]:
    return tuple(fold(reference, ignore_case) for reference in references)


def _stands_in(answer: str, alias: str) -> bool:
    """Whether an answer contains an alias at boundaries of words and numbers.

    Occurrences are checked one by one, because compiling a pattern for every row is slower; an answer with many
    occurrences gets the pattern.
    """
    begins = _NUMBER_BEGINS if alias[0].isdigit() else _WORD_BEGINS
    ends = _NUMBER_ENDS if alias[-1].isdigit() else _WORD_ENDS
    start = answer.find(alias)
    for _ in range(_MAX_SCANNED):
        if start < 0:
            return False
        if begins.match(answer, start) and ends.match(answer, start + len(alias)):
            return True
        start = answer.find(alias, start + 1)
    pattern = f"{begins.pattern}{re.escape(alias)}{ends.pattern}"
    return start >= 0 and re.compile(pattern).search(answer, start) is not None
