"""aeroRL's corrupted replay: responses of known flaws for any prompts and references, the same for the same id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUM_BUCKETS = 100
VERBOSE = (  # 19 words
    "Looking at the whole image again and again from each corner this answer seems the right one to me"
)


@dataclass(frozen=True)
class Pattern:
    """One kind of response; of the hundred buckets it has those below `end` that no earlier pattern has."""

    name: str
    end: int
    latency_ms: int
    response: Callable[[str], str]
    claim: Callable[[str], str]


def _json(**values: str) -> str:
    return json.dumps(values)


PATTERNS = (
    Pattern("good_json_exact", 58, 110, lambda ref: _json(answer=ref), lambda ref: ref),
    Pattern("format_bad_contains", 72, 150, lambda ref: f"answer: {ref}", lambda ref: ref),
    Pattern("grounding_hidden", 84, 170, lambda ref: _json(answer=ref), lambda ref: f"not-{ref}"),
    Pattern("wrong_answer", 95, 190, lambda ref: _json(answer=f"wrong-{ref}"), lambda ref: f"wrong-{ref}"),
    Pattern("verbose_slow", 100, 1400, lambda ref: _json(answer=ref, reasoning=VERBOSE), lambda ref: ref),
)


def pattern_of(sample_id: str) -> Pattern:
    """The pattern of a sample, by the first 24 bits of its id's MD5."""
    bucket = int(hashlib.md5(sample_id.encode(), usedforsecurity=False).hexdigest()[:6], 16) % NUM_BUCKETS
    return next(pattern for pattern in PATTERNS if bucket < pattern.end)


def corrupt(sample_id: str, prompt: str, reference: str) -> dict[str, Any]:
    """A record of the replay contract whose response follows the sample's pattern."""
    reference = reference.strip()
    pattern = pattern_of(sample_id)
    return {
        "id": sample_id,
        "prompt": prompt,
        "response": pattern.response(reference),
        "reference": reference,
        "metadata": {
            "evidence_entities": [reference],
            "claimed_entities": [pattern.claim(reference)],
            "latency_ms": pattern.latency_ms,
            "pattern": pattern.name,
        },
    }
