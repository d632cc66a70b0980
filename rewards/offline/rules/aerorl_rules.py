"""aeroRL's published rules, to the digit: what `compat=aerorl` scores by, its weaknesses included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mobula.rewards.offline.options import ScoreOptions, clipped, format_scores
from mobula.rewards.offline.rules.answers import Answer
from mobula.rewards.offline.rules.entities import Memo, aerorl_aliases
from mobula.rewards.offline.sources.records import Record

EXACT, CONTAINED, WRONG, UNKNOWN = 1.0, 0.5, -0.5, 0.0


class AeroRLRules:
    """Scores in the order of `COMPONENTS`; a record without references or claims gets 0 for that component."""

    name = "aerorl"
    reads_everything = False
    may_hang = False
    num_stuck = 0

    def __init__(self, options: ScoreOptions) -> None:
        self._require_json = options.require_json
        self._formats = format_scores(options)
        self._search = re.compile(options.regex_pattern).search if options.regex_pattern else None
        self._target_tokens = max(options.target_tokens, 1)
        self._budget_ms = max(options.latency_budget_ms, 1.0)
        self._aliases = Memo(aerorl_aliases)

    def prepare(self) -> None:
        """Nothing is needed."""

    def score_batch(
        self, records: Sequence[Record], references: Sequence[tuple[str, ...]], answers: Sequence[Answer]
    ) -> list[tuple[float, float, float, float]]:
        return list(map(self.score, records, references, answers))

    def score(self, record: Record, references: tuple[str, ...], answer: Answer) -> tuple[float, float, float, float]:
        """The four components; nothing is refused here."""
        metadata, search = record.metadata, self._search
        return (
            verify(record.response, references),
            self._ground(metadata.claimed_entities, metadata.evidence_entities),
            self._formats[answer.is_lenient_json, search is None or search(record.response) is not None],
            self._cost(record.response, metadata.latency_ms),
        )

    def explain(self, place: int, record: Record, answer: Answer) -> dict[str, dict[str, Any]]:
        """The details of each component in the published report, beside its score."""
        return {
            "verifier": _verifier_details(record.response, record.references),
            "grounding": self._grounding_details(record),
            "format": self._format_details(record.response, answer),
            "cost": {"token_count": len(record.response.split()), "latency_ms": float(record.metadata.latency_ms)},
        }

    def _ground(self, claimed: list[str] | None, evidence: list[str] | None) -> float:
        """2 * precision - 1 over the claims; claims that say the same thing twice count twice."""
        if not claimed:
            return UNKNOWN
        if claimed == evidence and len(claimed) == 1 and claimed[0][-1:].isalnum():
            return 1.0  # the usual case: what ends in a letter or digit shares at least its own text
        num_claimed, _, num_overlapping = self._count(claimed, evidence)
        return clipped(2.0 * (num_overlapping / num_claimed) - 1.0) if num_claimed else UNKNOWN

    def _count(self, claimed: list[str] | None, evidence: list[str] | None) -> tuple[int, int, int]:
        """Claims, pieces of evidence, and the claims among them that share an alias with some evidence."""
        claims = [aliases for aliases in map(self._aliases, claimed or ()) if aliases]
        known = [aliases for aliases in map(self._aliases, evidence or ()) if aliases]
        of_evidence = frozenset().union(*known)
        return len(claims), len(known), sum(not aliases.isdisjoint(of_evidence) for aliases in claims)

    def _cost(self, response: str, latency_ms: float) -> float:
        # n characters are at most (n + 1) / 2 tokens, so most responses need not be split
        is_short = len(response) < 2 * self._target_tokens
        return cost(0 if is_short else len(response.split()), latency_ms, self._target_tokens, self._budget_ms)

    def _grounding_details(self, record: Record) -> dict[str, Any]:
        metadata = record.metadata
        num_claimed, num_evidence, num_overlapping = self._count(metadata.claimed_entities, metadata.evidence_entities)
        if not num_claimed:
            return {"reason": "no_claimed_entities"}
        precision = round(num_overlapping / num_claimed, 4)
        return {
            "claimed": num_claimed,
            "evidence": num_evidence,
            "overlap": num_overlapping,
            "precision": precision,
        }

    def _format_details(self, response: str, answer: Answer) -> dict[str, Any]:
        details = {}
        if self._require_json:
            details["json_valid"] = answer.is_lenient_json
        if self._search is not None:
            details["regex_matched"] = self._search(response) is not None
        return details


def verify(response: str, references: tuple[str, ...]) -> float:
    """1 if the response is a reference, 0.5 if one stands somewhere in it, letter by letter, -0.5 otherwise."""
    if not references:
        return UNKNOWN
    text = response.strip().lower()
    best = WRONG
    for reference in references:
        reference = reference.lower()
        if text == reference:
            return EXACT
        if reference in text:
            best = CONTAINED
    return best


def cost(num_tokens: int, latency_ms: float, target_tokens: int, budget_ms: float) -> float:
    """1 less the shares by which tokens and latency exceed their budgets."""
    if num_tokens <= target_tokens and latency_ms <= budget_ms:
        return 1.0
    return clipped(1.0 - (max(0.0, num_tokens / target_tokens - 1.0) + max(0.0, latency_ms / budget_ms - 1.0)))


def _verifier_details(response: str, references: tuple[str, ...]) -> dict[str, Any]:
    if not references:
        return {"reason": "missing_reference"}
    text = response.strip().lower()
    exact = [reference for reference in references if reference.lower() == text]
    contained = [reference for reference in references if reference.lower() in text]
    return {
        "exact_match": bool(exact),
        "contains_reference": bool(contained),
        "matched_reference": (exact or contained or [""])[0],
        "reference_count": len(references),
    }
