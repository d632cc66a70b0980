"""The same four components as aeroRL's, without what can be got around in them: the default of offline scoring."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mobula.rewards.offline.options import ScoreOptions, clipped, format_scores
from mobula.rewards.offline.rules.aerorl_rules import CONTAINED, EXACT, UNKNOWN, WRONG, cost
from mobula.rewards.offline.rules.answers import Answer
from mobula.rewards.offline.rules.entities import Key, Memo, entity_keys, fold
from mobula.rewards.offline.sources.records import Record

NO_REFERENCE = "no reference"
_MAX_PLACES = 1000  # where a reference is looked for in one response
_FIRST_UNSPACED = "\N{CJK RADICAL REPEAT}"  # from here on scripts do not put spaces between words
_NEGATIONS = frozenset({"not", "no", "never", "without", "neither", "nor", "cannot"})
_LONGEST_NEGATION = 12


class MobulaRules:
    """Scores in the order of `COMPONENTS`, or why there is no score: a record without references is not scored.

    verifier: the answer itself is compared, as a whole and as a number; a reference inside it counts half, if it stands
    there as words of its own. grounding: entities are compared as wholes, each counts once, and what the evidence holds
    has to be claimed: 2 F1 - 1. format: an object is asked for, and the pattern may match over lines. cost: the tokens
    that were generated, where the record states them.
    """

    name = "mobula"
    reads_everything = False
    may_hang = False
    num_stuck = 0

    def __init__(self, options: ScoreOptions) -> None:
        self._formats = format_scores(options)
        self._search = re.compile(options.regex_pattern, re.DOTALL).search if options.regex_pattern else None
        self._target_tokens = max(options.target_tokens, 1)
        self._budget_ms = max(options.latency_budget_ms, 1.0)
        self._keys = Memo(entity_keys)

    def prepare(self) -> None:
        """Nothing is needed."""

    def score_batch(
        self, records: Sequence[Record], references: Sequence[tuple[str, ...]], answers: Sequence[Answer]
    ) -> list[tuple[float, float, float, float] | str]:
        return list(map(self.score, records, references, answers))

    def score(
        self, record: Record, references: tuple[str, ...], answer: Answer
    ) -> tuple[float, float, float, float] | str:
        """The four components, or the reason why they cannot be computed."""
        if not references:
            return NO_REFERENCE
        search = self._search
        return (
            self._verify(answer.text, references),
            self._ground(record, references),
            self._formats[answer.is_object, search is None or search(record.response) is not None],
            self._cost(record),
        )

    def explain(self, place: int, record: Record, answer: Answer) -> dict[str, dict[str, Any]]:
        """The causes of the scores, for readers of the report."""
        references = record.references
        precision, recall = self._overlap(record, references) or (None, None)
        return {
            "verifier": {"answer": answer.text, "reference_count": len(references)},
            "grounding": {"precision": _rounded(precision), "recall": _rounded(recall)},
            "format": {"json_object": answer.is_object},
            "cost": {"token_count": _num_tokens(record), "latency_ms": float(record.metadata.latency_ms)},
        }

    def _verify(self, answer: str | None, references: tuple[str, ...]) -> float:
        if not answer:
            return WRONG
        if answer in references:
            return EXACT
        keys = self._keys(answer)
        if not keys:
            return WRONG
        if any(not keys.isdisjoint(self._keys(reference)) for reference in references):
            return EXACT
        text = fold(answer)
        return CONTAINED if any(stands_in(fold(reference), text) for reference in references) else WRONG

    def _ground(self, record: Record, references: tuple[str, ...]) -> float:
        claimed = record.metadata.claimed_entities
        if claimed and len(claimed) == 1 and claimed == record.metadata.evidence_entities and claimed[0].strip():
            return 1.0
        found = self._overlap(record, references)
        if found is None:
            return UNKNOWN
        precision, recall = found
        return clipped(4.0 * precision * recall / (precision + recall) - 1.0) if precision + recall else -1.0

    def _overlap(self, record: Record, references: tuple[str, ...]) -> tuple[float, float] | None:
        """Precision and recall of the claimed entities; None where nothing was stated or there is nothing to claim.

        Pieces of evidence that are references are other words for the one right answer, so they are one entity.
        """
        claimed, evidence = record.metadata.claimed_entities, record.metadata.evidence_entities
        if claimed is None or evidence is None:
            return None
        claims = set(filter(None, map(self._keys, claimed)))
        entities = set(filter(None, map(self._keys, evidence)))
        if not claims and not entities:
            return None
        if not claims or not entities:
            return 0.0, 0.0
        if len(entities) > 1:
            entities = _merged(entities, frozenset().union(*map(self._keys, references)))
        known, said = frozenset().union(*entities), frozenset().union(*claims)
        precision = sum(not keys.isdisjoint(known) for keys in claims) / len(claims)
        return precision, sum(not keys.isdisjoint(said) for keys in entities) / len(entities)

    def _cost(self, record: Record) -> float:
        is_short = record.metadata.generated_tokens is None and len(record.response) < 2 * self._target_tokens
        num_tokens = 0 if is_short else _num_tokens(record)
        return cost(num_tokens, record.metadata.latency_ms, self._target_tokens, self._budget_ms)


def stands_in(part: str, text: str) -> bool:
    """Whether folded `part` stands in folded `text` as words of its own, and is not negated.

    "cat" does not stand in "category", "red" neither in "wrong-red" nor in "not red", "14" not in "3.14".
    """
    start = text.find(part) if part else -1
    for _ in range(_MAX_PLACES):
        if start < 0:
            return False
        end = start + len(part)
        if not (_joined(text, start) or _joined(text, end) or _is_negated(text, start)):
            return True
        start = text.find(part, start + 1)
    return False


def _joined(text: str, place: int) -> bool:
    """Whether the characters before and after `place` belong to one word or number."""
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    if before >= _FIRST_UNSPACED or after >= _FIRST_UNSPACED:
        return False
    if (before.isalnum() or before in "_-'") and (after.isalnum() or after in "_-'"):
        return True
    is_after_point = before in ".,/:" and after.isdigit() and text[max(0, place - 2)].isdigit()
    return is_after_point or (before.isdigit() and after in ".,/:" and text[place + 1 : place + 2].isdigit())


def _is_negated(text: str, start: int) -> bool:
    words = text[max(0, start - _LONGEST_NEGATION) : start].split()
    return bool(words) and (words[-1] in _NEGATIONS or words[-1].endswith("n't"))


def _merged(entities: set[frozenset[Key]], references: frozenset[Key]) -> set[frozenset[Key]]:
    aliases = {keys for keys in entities if not keys.isdisjoint(references)}
    return entities if len(aliases) < 2 else (entities - aliases) | {frozenset().union(*aliases)}


def _num_tokens(record: Record) -> int:
    stated = record.metadata.generated_tokens
    return len(record.response.split()) if stated is None else stated


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
