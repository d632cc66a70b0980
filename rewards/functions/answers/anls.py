"""ANLS: similarity of a short text to a reference by edit distance; 0 below a threshold."""

from __future__ import annotations

from typing import Literal

from rapidfuzz.distance import Levenshtein

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import RequestExtractor
from mobula.rewards.functions.parsing.references import check_number, given_references
from mobula.rewards.functions.parsing.unicode_latex import plain_forms
from mobula.rewards.tools import Tools


class Anls:
    """Average normalised Levenshtein similarity (Biten et al. 2019, "Scene Text Visual Question Answering").

    For each reference d = edit distance / length of the longer text, both in lower case with single spaces. The value
    is 1 - min d, or 0 if below `threshold` (published: 0.5). `extract` selects the part of the response with the
    answer (`mobula.rewards.functions.parsing.extraction`).

    `lengths="raw"` uses lengths before white space is folded, like the public scorers, which rewards blanks in a wrong
    answer; `"folded"` uses lengths of the compared texts. Deliberate differences from the publication: surrounding
    white space is stripped, an empty answer scores 0, and a prompt without references is a `RewardError`.
    """

    def __init__(self, tools: Tools, *, threshold: float, lengths: Literal["raw", "folded"], extract: str) -> None:
        check_number("threshold", threshold, low=0, high=1)
        if lengths not in ("raw", "folded"):
            raise ValueError(f"lengths={lengths!r} is unknown: use raw or folded")
        self._threshold = threshold
        self._counts_raw = lengths == "raw"
        self._extract = RequestExtractor(extract)

    def __call__(self, request: RewardRequest) -> Score:
        references = given_references(request.references)
        answer, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        value = max(self._similarity(answer, reference) for reference in references)
        return Score(value) if value >= self._threshold else Score(0.0, "too far from every reference")

    def _similarity(self, answer: str, reference: str) -> float:
        answer, reference = plain_forms(answer), plain_forms(reference)
        ours, theirs = _fold(answer), _fold(reference)
        length = max(len(answer), len(reference)) if self._counts_raw else max(len(ours), len(theirs))
        most = int(length * (1 - self._threshold)) + 1  # above it the value is 0, so long texts are not compared fully
        return 1 - Levenshtein.distance(ours, theirs, score_cutoff=most) / length


def _fold(text: str) -> str:
    return " ".join(text.lower().split())
