"""Exact match: 1 if the response is one of the references word for word, else 0."""

from __future__ import annotations

import re
from functools import lru_cache

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import RequestExtractor
from mobula.rewards.functions.parsing.references import check_true_or_false, given_references
from mobula.rewards.functions.parsing.unicode_latex import composed
from mobula.rewards.tools import Tools

# A digit at an alias's edge must be the number's edge as well: 7 is not in -7, 3.7, 7.5, 7/8, 1,007, 7:30 or 7%.
_NUMBER_BEGINS = re.compile(r"(?<!\w)(?<![-+.\N{MINUS SIGN}\N{EN DASH}])(?<![0-9][,:/^*])")
_NUMBER_ENDS = re.compile(r"(?![-+.,:/^*\N{EN DASH}][0-9])(?!\s?%)(?!\w)")
# A word at its edge must be a whole one: Germany is not in wrong-Germany, red not in red-haired.
_WORD_BEGINS = re.compile(r"(?<!\w)(?<!\w-)")
_WORD_ENDS = re.compile(r"(?!-\w)(?!\w)")

_FEW_PLACES = 32


class ExactMatch:
    """Compares text, every reference being an alias of the right answer; white space counts as one space.

    `ignore_case` folds upper and lower case. `whole_response` asks for nothing but the answer; else it may stand
    anywhere in what was extracted, between the boundaries of words ("cat" is not in "concatenate" or "cat-like") and
    numbers ("7" is not in "-7", "3.7" or "7/8"). Other text there is ignored: "not red" has "red".
    `extract` selects where the answer stands (`mobula.rewards.functions.parsing.extraction`); None is `whole`.
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
    """White space as single spaces, and none around; one way to write an accent (NFC); with `ignore_case`, one case."""
    text = " ".join(composed(text).split())
    return text.casefold() if ignore_case else text


@lru_cache(maxsize=4096)  # a group's responses share their references
def _aliases(references: tuple[str, ...], ignore_case: bool) -> tuple[str, ...]:
    return tuple(fold(reference, ignore_case) for reference in references)


def _stands_in(answer: str, alias: str) -> bool:
    """Whether an alias stands somewhere in an answer with the right edges.

    A pattern with the alias in it would be compiled for every row of the data: it is, where the alias stands in many
    places, since it looks at the edge first.
    """
    begins = _NUMBER_BEGINS if alias[0].isdigit() else _WORD_BEGINS
    ends = _NUMBER_ENDS if alias[-1].isdigit() else _WORD_ENDS
    start = answer.find(alias)
    for _ in range(_FEW_PLACES):
        if start < 0:
            return False
        if begins.match(answer, start) and ends.match(answer, start + len(alias)):
            return True
        start = answer.find(alias, start + 1)
    pattern = f"{begins.pattern}{re.escape(alias)}{ends.pattern}"
    return start >= 0 and re.compile(pattern).search(answer, start) is not None
