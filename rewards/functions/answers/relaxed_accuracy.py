"""Relaxed accuracy: 1 if a number is within a tolerance of a reference, or a text equals one, else 0."""

from __future__ import annotations

import re

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import RequestExtractor
from mobula.rewards.functions.parsing.references import check_number, given_references
from mobula.rewards.functions.parsing.unicode_latex import plain_forms
from mobula.rewards.tools import Tools

_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?)(\s?%|)")


class RelaxedAccuracy:
    """The metric of PlotQA (Methani et al. 2020) and ChartQA (Masry et al. 2022).

    If answer a and reference r are both numbers and r is not 0, the value is 1 for |a - r| / |r| <= `tolerance`
    (published: 0.05); "x%" is x / 100. Otherwise the value is 1 if the texts are equal, ignoring case. `extract`
    selects the part of the response with the answer (`mobula.rewards.functions.parsing.extraction`).

    A number is a decimal in ASCII or full-width digits, with or without exponent. Deliberate differences from the
    public scorers: "nan", "inf", "1_000" and digits of other scripts are texts, surrounding white space is stripped,
    an empty answer scores 0, and a prompt without references is a `RewardError`. As published, "1,000" is a text.
    """

    def __init__(self, tools: Tools, *, tolerance: float, extract: str) -> None:
        check_number("tolerance", tolerance, low=0, high=1)
        self._tolerance = tolerance
        self._extract = RequestExtractor(extract)

    def __call__(self, request: RewardRequest) -> Score:
        references = given_references(request.references)
        answer, flaw = self._extract(request)
        if flaw:
            return Score(0.0, flaw)
        return Score(float(any(self._equals(answer, reference.strip()) for reference in references)))

    def _equals(self, answer: str, reference: str) -> bool:
        ours, theirs = _read(answer), _read(reference)
        if ours is not None and theirs:
            return abs(ours - theirs) / abs(theirs) <= self._tolerance
        return answer.lower() == reference.lower()


def _read(text: str) -> float | None:
    if len(text) > 400:  # longer than any finite float
        return None
    match = _NUMBER.fullmatch(plain_forms(text))
    if match is None:
        return None
    number = float(match[1]) / 100 if match[2] else float(match[1])
    return number if abs(number) < float("inf") else None
