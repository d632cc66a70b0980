"""Exact match: 1 if the response says one of the references word for word, else 0."""

from __future__ import annotations

import re

from cluster.errors import RewardError
from rewards.contract import RewardRequest, Score
from rewards.tools import Tools


class ExactMatch:
    """Compares text, every reference being an alias of the right answer; white space counts as one space.

    `ignore_case` folds upper and lower case. `whole_response` asks for nothing but the answer; else it may stand
    anywhere in the response between word boundaries ("cat" is not in "concatenate").
    """

    def __init__(self, tools: Tools, *, ignore_case: bool, whole_response: bool) -> None:
        for option, value in {"ignore_case": ignore_case, "whole_response": whole_response}.items():
            if not isinstance(value, bool):
                raise ValueError(f"{option}={value!r} is neither true nor false")
        self._ignore_case = ignore_case
        self._whole_response = whole_response

    def __call__(self, request: RewardRequest) -> Score:
        aliases = [alias for alias in map(self._fold, request.references) if alias]
        if not aliases:
            raise RewardError("the prompt has no reference answer to compare with")
        text = self._fold(request.response.text)
        if self._whole_response:
            return Score(float(text in aliases))
        return Score(float(any(re.search(rf"(?<!\w){re.escape(alias)}(?!\w)", text) for alias in aliases)))

    def _fold(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text
