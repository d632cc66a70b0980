"""aeroRL's rules exactly as published, weaknesses included: the components of `rewards=aerorl`.

The metadata of a record has `claimed_entities`, `evidence_entities` and `latency_ms`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest
from mobula.rewards.tools import Tools

EXACT, CONTAINED, WRONG, UNKNOWN = 1.0, 0.5, -0.5, 0.0
NO_JSON_PENALTY, NO_MATCH_PENALTY = 1.3, 0.5

_JSON_STARTS = frozenset('{["-0123456789tfnNI \t\r\n')  # first characters of texts that Python parses as JSON
_STOP_WORDS = frozenset("a an the within about around approximately roughly nearly just only".split())
_TOKEN = re.compile(r"(?:[+-]?\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)*%?)|(?:[a-z]+(?:['-][a-z]+)*)")
_SENTENCE_ENDS = ".,;:!?"
_decode = msgspec.json.Decoder().decode


class AeroRLContains:
    """The manual baseline: 1 if the response contains a reference, ignoring case, else 0."""

    def __init__(self, tools: Tools) -> None: ...

    def __call__(self, request: RewardRequest) -> float:
        text = request.response.text.lower()
        for reference in request.references:
            if reference.lower() in text:
                return 1.0
        return 0.0


class AeroRLVerifier:
    """1 if the response equals a reference, 0.5 if it contains a reference, -0.5 otherwise; 0 without references."""

    def __init__(self, tools: Tools) -> None: ...

    def __call__(self, request: RewardRequest) -> float:
        if not request.references:
            return UNKNOWN
        text = request.response.text.strip().lower()
        best = WRONG
        for reference in request.references:
            reference = reference.lower()
            if text == reference:
                return EXACT
            if reference in text:
                best = CONTAINED
        return best


class AeroRLGrounding:
    """2 * precision - 1 over the claims; 0 without claims. A claim is true if it shares an alias with the evidence.

    Repeated claims count repeatedly.
    """

    def __init__(self, tools: Tools) -> None: ...

    def __call__(self, request: RewardRequest) -> float:
        claimed = _texts(request.metadata, "claimed_entities")
        if not claimed:
            return UNKNOWN
        evidence_texts = _texts(request.metadata, "evidence_entities")
        if claimed == evidence_texts and len(claimed) == 1 and claimed[0][-1:].isalnum():
            return EXACT  # fast path: a text that ends in a letter or digit is an alias of itself
        claims = [names for names in map(aliases, claimed) if names]
        if not claims:
            return UNKNOWN
        evidence = frozenset().union(*map(aliases, evidence_texts))
        num_true = sum(not claim.isdisjoint(evidence) for claim in claims)
        return 2.0 * (num_true / len(claims)) - 1.0


class AeroRLFormat:
    """1, minus 1.3 if JSON is required and Python cannot parse the response, minus 0.5 if the pattern does not match;
    at least -1. An empty pattern always matches.
    """

    def __init__(self, tools: Tools, *, require_json: bool, regex_pattern: str) -> None:
        self._require_json = require_json
        try:
            self._search = re.compile(regex_pattern).search
        except (re.error, TypeError) as error:
            raise ValueError(f"regex_pattern={regex_pattern!r} is no regular expression: {error}") from error

    def __call__(self, request: RewardRequest) -> float:
        text = request.response.text
        score = 1.0
        if self._require_json and not is_json(text):
            score -= NO_JSON_PENALTY
        if self._search(text) is None:
            score -= NO_MATCH_PENALTY
        return max(-1.0, score)


class AeroRLCost:
    """1 minus the relative excess of words and of latency over the budgets; at least -1."""

    def __init__(self, tools: Tools, *, target_tokens: int, latency_budget_ms: float) -> None:
        self._target_tokens = max(target_tokens, 1)
        self._budget_ms = max(latency_budget_ms, 1.0)

    def __call__(self, request: RewardRequest) -> float:
        latency_ms = request.metadata.get("latency_ms") or 0.0
        try:
            over_latency = max(0.0, float(latency_ms) / self._budget_ms - 1.0)
        except (TypeError, ValueError) as error:
            raise RewardError(f"metadata.latency_ms={latency_ms!r:.40} is no time in milliseconds") from error
        num_tokens = len(request.response.text.split())
        over_tokens = max(0.0, num_tokens / self._target_tokens - 1.0)
        return max(-1.0, 1.0 - (over_tokens + over_latency))


def is_json(text: str) -> bool:
    """Whether Python's json module parses the text, including NaN and infinities."""
    if text[:1] not in _JSON_STARTS:
        return False
    try:
        _decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):  # stricter: no NaN, surrogates, or huge numbers
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return False
    return True


@lru_cache(maxsize=1 << 17)
def aliases(text: str) -> frozenset[str]:
    """Returns all spellings of an entity; entities with a common spelling are equal.

    The spellings are the text in lower case without closing punctuation, the tokens, the tokens without stop words, and
    each number; a percentage also as a fraction. A text of punctuation only is "", which equals any other such text.
    """
    text = " ".join(text.lower().split())
    tokens = _TOKEN.findall(text)
    if not tokens:
        return frozenset({text.rstrip(_SENTENCE_ENDS)}) if text else frozenset()
    spellings = {text.rstrip(_SENTENCE_ENDS), " ".join(tokens), " ".join(t for t in tokens if t not in _STOP_WORDS)}
    for token in tokens:
        number = token.removesuffix("%")
        if "-" not in number and number[-1].isdigit():
            value = float(number)
            spellings.add(f"{value:g}")
            if number != token:
                spellings |= {f"{value:g}%", f"{value / 100:g}"}
    spellings.discard("")
    return frozenset(spellings)


def _texts(metadata: Any, key: str) -> Sequence[str]:
    value = metadata.get(key)
    if value is None:
        return ()
    items = value if isinstance(value, list) else list(value) if isinstance(value, tuple) else [value]
    for item in items:
        if not isinstance(item, str):
            items = [item for item in items if item is not None]
            if not all(isinstance(item, str | int | float) for item in items):
                raise RewardError(f"metadata.{key} is {value!r:.80}, no list of texts")
            return list(map(str, items))
    return items
