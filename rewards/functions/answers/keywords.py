"""Keywords: the share of the prompt's keywords in a description."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.references import given_metadata
from mobula.rewards.tools import Tools

_WORD = re.compile(r"\w+")


class Keywords:
    """hits / number of keywords. A keyword of `metadata.keywords` counts once, as whole words, ignoring case.

    The share of a response with more than `max_words` words is multiplied by max_words / words, so that listing all
    words does not pay; 0 is no limit. `compat=vlm_gym` also finds keywords inside words, and has no limit.

    Raises:
        RewardError: the metadata has no keywords.
    """

    def __init__(self, tools: Tools, *, max_words: int, compat: Literal["none", "vlm_gym"]) -> None:
        if isinstance(max_words, bool) or not isinstance(max_words, int) or max_words < 0:
            raise ValueError(f"max_words={max_words!r} is unfit: give a whole number, 0 for no limit")
        if compat not in ("none", "vlm_gym"):
            raise ValueError(f"compat={compat!r} is unknown: use none or vlm_gym")
        self._max_words = max_words
        self._is_compatible = compat == "vlm_gym"

    def __call__(self, request: RewardRequest) -> Score:
        keywords, text = given_metadata(request.metadata, "keywords"), request.response.text
        if not isinstance(keywords, list | tuple) or not keywords or not all(map(_is_word, keywords)):
            raise RewardError(f"metadata.keywords is {keywords!r}: give a list of words")
        if self._is_compatible:
            hits = sum(keyword.lower() in text.lower() for keyword in keywords)
            return Score(hits / len(keywords), "", _parts(hits, keywords, 0))
        hits = sum(_pattern(keyword).search(text) is not None for keyword in keywords)
        num_words = len(_WORD.findall(text))
        is_long = self._max_words and num_words > self._max_words
        brevity = self._max_words / num_words if is_long else 1.0
        reason = f"{num_words} words, {self._max_words} are enough" if is_long else ""
        return Score(brevity * hits / len(keywords), reason, _parts(hits, keywords, num_words))


def _parts(hits: int, keywords: Sequence[str], num_words: int) -> dict[str, float]:
    return {"hits": float(hits), "num_keywords": float(len(keywords)), "words": float(num_words)}


def _is_word(keyword: object) -> bool:
    return isinstance(keyword, str) and bool(keyword.strip())


@lru_cache(maxsize=4096)  # a group's responses share their keywords
def _pattern(keyword: str) -> re.Pattern[str]:
    words = r"\s+".join(map(re.escape, keyword.split()))
    return re.compile(rf"(?<!\w){words}(?!\w)", re.IGNORECASE)
