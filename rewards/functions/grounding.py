"""Grounding: F1 of the entities claimed by a response against the entities of the evidence."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.answers.exact_match import fold
from mobula.rewards.functions.parsing.references import given_metadata
from mobula.rewards.functions.parsing.strict_json import read_json, type_name
from mobula.rewards.tools import Tools

_NUMBER = re.compile(r"([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(%?)")
_MAX_NUMBER_CHARS = 100  # longer numbers are compared as text
_ARTICLES = ("the ", "a ", "an ")

Entity = str | Fraction


class Grounding:
    """F1 of claimed entities against the evidence; precision and recall are in the breakdown.

    Entities are compared as a whole: a number by value ("1,000" is 1000.0, "10%" is 0.1), so "14" is not in "page 14
    of 2020"; a text without case, surrounding punctuation and leading article. Repeated claims count once.

    `claims` selects the claims: `metadata:KEY`, or `json:FIELD` for an array of texts and numbers in a response that is
    a strict JSON object (`fenced_json:FIELD` allows a code block). `evidence` is the metadata key of the entities.

    Raises:
        RewardError: the metadata lacks the evidence or the claims.
    """

    def __init__(self, tools: Tools, *, claims: str, evidence: str) -> None:
        source, _, self._claims_name = claims.partition(":") if isinstance(claims, str) else ("", "", "")
        if source not in ("metadata", "json", "fenced_json") or not self._claims_name:
            raise ValueError(f"claims={claims!r} is unknown: use metadata:KEY, json:FIELD or fenced_json:FIELD")
        if not isinstance(evidence, str) or not evidence:
            raise ValueError(f"evidence={evidence!r} is no key: name the metadata that has the entities")
        self._source = source
        self._evidence = evidence

    def __call__(self, request: RewardRequest) -> Score:
        evidence = _entities_of_metadata(request, self._evidence)
        if not evidence:
            raise RewardError(f"metadata.{self._evidence} has no entity to ground a claim in")
        claims, flaw = self._claims(request)
        if not claims:
            return Score(0.0, flaw or "no entity is claimed", {"precision": 0.0, "recall": 0.0})
        num_shared = len(claims & evidence)
        parts = {"precision": num_shared / len(claims), "recall": num_shared / len(evidence)}
        return Score(2 * num_shared / (len(claims) + len(evidence)), "", parts)

    def _claims(self, request: RewardRequest) -> tuple[frozenset[Entity], str]:
        if self._source == "metadata":
            return _entities_of_metadata(request, self._claims_name), ""
        value, flaw = read_json(request.response.text, fenced=self._source == "fenced_json")
        if flaw:
            return frozenset(), flaw
        if not isinstance(value, dict):
            return frozenset(), f"not a JSON object: {type_name(value)}"
        claims = value.get(self._claims_name)
        if not isinstance(claims, list) or not all(isinstance(claim, str) for claim in claims):  # a number is its text
            return frozenset(), f"field {self._claims_name!r} is no array of texts and numbers"
        return _entities(claims), ""


def entity(text: str) -> Entity:
    """Returns a key that is equal for all spellings of an entity; "" if the text has no entity."""
    text = fold(text, ignore_case=True)
    number = _NUMBER.fullmatch(text) if len(text) <= _MAX_NUMBER_CHARS else None
    if number is None:  # after the number: ".5" without its point would be 5
        text = text.strip(" ;:!?\"'()[]{}*`").rstrip(" .,")
        number = _NUMBER.fullmatch(text) if len(text) <= _MAX_NUMBER_CHARS else None
    if number is not None:
        value = Fraction(number[1] + number[2].replace(",", ""))
        return value / 100 if number[3] else value
    for article in _ARTICLES:
        text = text.removeprefix(article)
    return text


def _entities(texts: Any) -> frozenset[Entity]:
    return frozenset(map(entity, texts)) - {""}


def _entities_of_metadata(request: RewardRequest, key: str) -> frozenset[Entity]:
    entries = given_metadata(request.metadata, key)
    if not isinstance(entries, list | tuple) or not all(type(entry) in (str, int, float) for entry in entries):
        raise RewardError(f"metadata.{key} is no list of texts and numbers: {repr(entries)[:200]}")
    return _known(tuple(map(str, entries)))


_known = lru_cache(maxsize=4096)(_entities)  # a group's responses share their evidence
