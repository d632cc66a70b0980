"""aeroRL's rules once more, in plain Python and one process: the other side of `score_records`.

It is written from docs/algorithms.md alone and shares no code with `rewards`, so that it is a check as well.

    python -m benchmarks.raw.score_reference FILE REPORT.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("verifier", "grounding", "format", "cost")
FILLERS = {"a", "an", "the", "within", "about", "around", "approximately", "roughly", "nearly", "just", "only"}
TOKENS = r"[-+]?\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)*%?|[a-z]+(?:[-'][a-z]+)*"
Settings = Mapping[str, Any]


def score_file(path: Path, settings: Settings) -> dict[str, Any]:
    """The scores of all records of a JSONL file; lines that are no records are counted."""
    records, num_broken = [], 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                num_broken += 1
                continue
            if isinstance(record, dict) and record.get("response") is not None:
                records.append(record)
            else:
                num_broken += 1
    return {**score_records(records, settings), "num_broken": num_broken}


def score_records(records: Sequence[Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """The figures of a report, in its own keys."""
    manual = [is_manual_pass(record) for record in records]
    scores = [aerorl(record, settings) for record in records]
    return {"count": len(records), "num_manual_passes": sum(manual), **summary(records, manual, scores, settings)}


def summary(
    records: Sequence[Mapping[str, Any]], manual: Sequence[bool], scores: Sequence[Any], settings: Settings
) -> dict[str, Any]:
    rows = [
        (weighted(found, settings), found, record.get("id"), is_pass)
        for record, found, is_pass in zip(records, scores, manual, strict=True)
    ]
    if not rows:
        return {"num_scored": 0}
    ordered = sorted(rows, key=lambda row: row[0], reverse=True)
    top_k = settings["top_k"]
    caught = [row for row in rows if row[3] and row[0] < settings["pass_threshold"]]
    return {
        "num_scored": len(rows),
        "average_reward": round(sum(row[0] for row in rows) / len(rows), 6),
        "pass_rate": round(sum(row[0] >= settings["pass_threshold"] for row in rows) / len(rows), 6),
        "component_averages": {
            name: round(sum(row[1][i] for row in rows) / len(rows), 6) for i, name in enumerate(NAMES)
        },
        "best": [row[2] for row in ordered[:top_k]],
        "worst": [row[2] for row in ordered[len(ordered) - min(top_k, len(ordered)) :]],
        "num_caught": len(caught),
        "caught": [row[2] for row in caught][: settings["max_ids"]],
    }


def weighted(scores: Sequence[float], settings: Settings) -> float:
    return round(sum(settings["weights"][name] * score for name, score in zip(NAMES, scores, strict=True)), 6)


def is_manual_pass(record: Mapping[str, Any]) -> bool:
    text = record["response"].lower()
    return any(reference.lower() in text for reference in references_of(record))


def references_of(record: Mapping[str, Any]) -> list[str]:
    reference = record.get("reference")
    references = reference if isinstance(reference, list) else [] if reference is None else [reference]
    return [str(item).strip() for item in references if str(item).strip()]


def metadata_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return record.get("metadata") or {}


def penalised(num_tokens: int, record: Mapping[str, Any], settings: Settings) -> float:
    latency = float(metadata_of(record).get("latency_ms") or 0)
    over_tokens = max(0.0, num_tokens / max(settings["target_tokens"], 1) - 1.0)
    over_latency = max(0.0, latency / max(settings["latency_budget_ms"], 1.0) - 1.0)
    return max(-1.0, min(1.0, 1.0 - (over_tokens + over_latency)))


def shaped(is_right: bool, matches: bool, settings: Settings) -> float:
    score = 1.0
    if settings["require_json"] and not is_right:
        score -= 1.3
    if settings["regex_pattern"] and not matches:
        score -= 0.5
    return max(-1.0, score)


def aerorl(record: Mapping[str, Any], settings: Settings) -> tuple[float, ...]:
    response = record["response"]
    try:
        json.loads(response)
        is_json = True
    except (ValueError, RecursionError):
        is_json = False
    matches = re.search(settings["regex_pattern"], response) is not None
    return (
        aerorl_verifier(response, references_of(record)),
        aerorl_grounding(metadata_of(record)),
        shaped(is_json, matches, settings),
        penalised(len(response.split()), record, settings),
    )


def aerorl_verifier(response: str, references: Sequence[str]) -> float:
    if not references:
        return 0.0
    text = response.strip().lower()
    if text in {reference.lower() for reference in references}:
        return 1.0
    return 0.5 if any(reference.lower() in text for reference in references) else -0.5


def aerorl_grounding(metadata: Mapping[str, Any]) -> float:
    claims = [names for item in metadata.get("claimed_entities") or [] if (names := spellings(item))]
    evidence = [names for item in metadata.get("evidence_entities") or [] if (names := spellings(item))]
    if not claims:
        return 0.0
    return 2.0 * (sum(any(claim & known for known in evidence) for claim in claims) / len(claims)) - 1.0


def spellings(text: str) -> set[str]:
    text = re.sub(r"\s+", " ", text.strip().lower()).strip()
    tokens = re.findall(TOKENS, text)
    found = {text.rstrip(".,;:!?")}
    if text and not tokens:
        return found
    found.add(" ".join(tokens))
    found.add(" ".join(token for token in tokens if token not in FILLERS))
    for token in tokens:
        if re.fullmatch(r"\+?\d+(\.\d+)?%?", token):
            number = float(token.rstrip("%"))
            found.add(format(number, "g"))
            if token.endswith("%"):
                found |= {format(number, "g") + "%", format(number / 100, "g")}
    return found - {""}


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    options = json.loads(sys.stdin.read())
    target.write_text(json.dumps(score_file(source, options), indent=1), encoding="utf-8")
