"""Reflection: whether a response has one of the words with which models look back at their own reasoning."""

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
    """1 if the response has at least one of `words`, else 0; the reason counts them. The words are MAYE's by default
    (arXiv:2504.02587).

    With `whole_words` a word counts only between word boundaries. Without, it counts inside other words too, as in the
    published evaluation: "awaiting" then has "wait".
    """

    def __init__(self, tools: Tools, *, words: Sequence[str] = MAYE_WORDS, whole_words: bool = True) -> None:
        if isinstance(words, str) or not words or not all(isinstance(word, str) and word for word in words):
            raise ValueError(f"words={words!r} is unfit: give a list of words, or leave it out")
        boundary = r"\b" if whole_words else ""
        longest_first = sorted(set(words), key=len, reverse=True)
        self._pattern = re.compile(f"{boundary}(?:{'|'.join(map(re.escape, longest_first))}){boundary}", re.IGNORECASE)

    def __call__(self, request: RewardRequest) -> Score:
        found = Counter(word.lower() for word in self._pattern.findall(request.response.text))
        return Score(float(bool(found)), ", ".join(f"{word} {count}" for word, count in sorted(found.items())))
