"""Reflection: 1 if a response has a word with which models review their reasoning, else 0."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.tools import Tools

MAYE_WORDS = (
    "re-check", "re-evaluate", "re-examine", "re-think", "recheck", "reevaluate", "reexamine", "reevaluation",
    "rethink", "check again", "think again", "try again", "verify", "wait", "yet",
)  # fmt: skip


class Reflection:
    """1 if the response has at least one of `words`, by default MAYE's (arXiv:2504.02587), else 0; the reason has the
    counts.

    With `whole_words` a word counts only between word boundaries. Otherwise it also counts inside other words, as in
    the published evaluation: "awaiting" has "wait".
    """

    def __init__(self, tools: Tools, *, words: Sequence[str] = MAYE_WORDS, whole_words: bool = True) -> None:
        if isinstance(words, str) or not words or not all(isinstance(word, str) and word for word in words):
            raise ValueError(f"words={words!r} is unfit: give a list of words, or leave it out")
        boundary = r"\b" if whole_words else ""
        longest_first = sorted(set(words), key=len, reverse=True)
        self._pattern = re.compile(f"{boundary}(?:{'|'.join(map(re.escape, longest_first))}){boundary}", re.IGNORECASE)

    def __call__(self, request: RewardRequest) -> Score:
        counts = Counter(word.lower() for word in self._pattern.findall(request.response.text))
        return Score(float(bool(counts)), ", ".join(f"{word} {count}" for word, count in sorted(counts.items())))
