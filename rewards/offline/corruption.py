"""The corruption benchmark: responses of known flaws for any prompts and references, the same for the same id."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any

from mobula.cluster.records.json_lines import parse_json

NUM_BUCKETS = 100
VERBOSE = (  # 19 words
    "Looking at the whole picture again and again from each corner this answer seems the right one to me"
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


def corrupt_lines(lines: Iterable[bytes], target: IO[bytes]) -> Counter[str]:
    """Write a record for each line with a prompt and a reference, one by one; returns how many of each pattern.

    A sample without an id is named by its line. Of several references the first one is taken.

    Raises:
        ValueError: a line is no JSON object or has no reference; the message begins with its number.
    """
    counts: Counter[str] = Counter({pattern.name: 0 for pattern in PATTERNS})
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"line {number}: no JSON ({error})") from error
        record = corrupt(*_sample(row, number))
        target.write(json.dumps(record).encode() + b"\n")
        counts[record["metadata"]["pattern"]] += 1
    return counts


def _sample(row: Any, number: int) -> tuple[str, str, str]:
    """Id, prompt and first reference of a row, be it a record, or a row of a data folder."""
    if not isinstance(row, dict):
        raise ValueError(f"line {number}: a {type(row).__name__}, not an object")
    references = next((row[key] for key in ("reference", "references", "answer") if row.get(key) is not None), None)
    first = references[0] if isinstance(references, list) and references else references
    if first is None or isinstance(first, list | dict) or not str(first).strip():
        raise ValueError(f"line {number}: it has no reference: give it one, as a text or a list of texts")
    sample_id, prompt = row.get("id"), row.get("prompt") or row.get("question") or ""
    return f"line-{number}" if sample_id is None else str(sample_id), str(prompt), str(first)
