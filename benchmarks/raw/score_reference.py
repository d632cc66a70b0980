"""The rules of offline scoring once more, in plain Python and one process: the other side of `score_records`.

It is written from docs/algorithms.md alone and shares no code with `rewards/offline`, so that it is a check as well.

    python -m benchmarks.raw.score_reference FILE REPORT.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

NAMES = ("verifier", "grounding", "format", "cost")
FILLERS = {"a", "an", "the", "within", "about", "around", "approximately", "roughly", "nearly", "just", "only"}
TOKENS = r"[-+]?\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)*%?|[a-z]+(?:[-'][a-z]+)*"
WORD_CHARS = r"_\-'"
Settings = Mapping[str, Any]


def score_file(path: Path, settings: Settings) -> dict[str, Any]:
    """Both readings of all records of a JSONL file; lines that are no records are counted."""
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
    """The figures of a report by reading, in its own keys."""
    manual = [is_manual_pass(record) for record in records]
    readings: dict[str, Callable[..., Any]] = {"aerorl": aerorl, "mobula": mobula}
    found = {name: [reading(record, settings) for record in records] for name, reading in readings.items()}
    pairs = list(zip(found["mobula"], found["aerorl"], strict=True))
    return {
        "count": len(records),
        "num_manual_passes": sum(manual),
        **{name: summary(records, manual, scores, settings) for name, scores in found.items()},
        "differences": {
            name: sum(ours is not None and ours[i] != theirs[i] for ours, theirs in pairs)
            for i, name in enumerate(NAMES)
        },
    }


def summary(
    records: Sequence[Mapping[str, Any]], manual: Sequence[bool], scores: Sequence[Any], settings: Settings
) -> dict[str, Any]:
    rows = [
        (weighted(found, settings), found, record.get("id"), is_pass)
        for record, found, is_pass in zip(records, scores, manual, strict=True)
        if found is not None
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
        "caught": sorted(str(row[2]) for row in caught)[: settings["max_ids"]],
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


# The published reading


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


# Ours


def mobula(record: Mapping[str, Any], settings: Settings) -> tuple[float, ...] | None:
    references = references_of(record)
    if not references:
        return None
    response, metadata = record["response"], metadata_of(record)
    answer, is_object = answer_of(response)
    matches = re.search(settings["regex_pattern"], response, re.DOTALL) is not None
    stated = metadata.get("generated_tokens")
    return (
        mobula_verifier(answer, references),
        mobula_grounding(metadata, references),
        shaped(is_object, matches, settings),
        penalised(len(response.split()) if stated is None else stated, record, settings),
    )


def answer_of(response: str) -> tuple[str | None, bool]:
    if response.startswith("```"):
        inner = response.strip()[3:].removesuffix("```").removeprefix("json").strip()
        answer, is_object = answer_of(inner) if not inner.startswith("```") else (None, False)
        return (answer if is_object else boxed(response)), False
    try:
        value = json.loads(response, parse_constant=lambda word: float(f"{word} is no JSON"))
    except (ValueError, RecursionError):
        return boxed(response), False
    if isinstance(value, dict):
        if "answer" in value or len(value) == 1:
            value = value["answer"] if "answer" in value else next(iter(value.values()))
            return plain(value), True
        return None, True
    return (response if isinstance(value, list) else plain(value)), False


def boxed(response: str) -> str:
    """The inside of the last box that is closed, or all of it."""
    for match in reversed(list(re.finditer(r"\\boxed\{", response))):
        depth = 1
        for place in range(match.end(), len(response)):
            depth += {"{": 1, "}": -1}.get(response[place], 0)
            if depth == 0:
                return response[match.end() : place]
    return response


def plain(value: Any) -> str | None:
    return value if isinstance(value, str) else None if isinstance(value, dict | list) else json.dumps(value)


def mobula_verifier(answer: str | None, references: Sequence[str]) -> float:
    if not answer or not answer.strip():
        return -0.5
    if any(same(answer, reference) for reference in references):
        return 1.0
    return 0.5 if any(holds(folded(answer), folded(reference)) for reference in references) else -0.5


def folded(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().casefold()


def meanings(text: str) -> frozenset[Any]:
    if not text.strip():
        return frozenset()
    text = folded(text)
    number = re.fullmatch(r"([+-]?)\$?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+) ?(%?)", text.rstrip(".,;:!?"))
    if number is not None and text.isascii() and len(text) <= 64:
        value = Decimal(number[1] + number[2].replace(",", "")).normalize()
        return frozenset({value, (value / 100).normalize()} if number[3] else {value})
    word = text.strip(".,;:!?\"'()[]{}").strip()
    return frozenset({re.sub(r"^(the|an|a) (?=.)", "", word) or text})


def same(one: str, other: str) -> bool:
    return bool(meanings(one) & meanings(other))


def holds(text: str, part: str) -> bool:
    """Whether `part` is among the words of `text`, not inside of one, and not right behind a negation."""
    for match in re.finditer(f"(?={re.escape(part)})", text):
        start, end = match.start(), match.start() + len(part)
        negated = re.search(r"(?:^|\s)(?:not|no|never|without|neither|nor|cannot|\S*n't)\s*$", text[:start])
        if not glued(text, start) and not glued(text, end) and not negated:
            return True
    return False


def glued(text: str, place: int) -> bool:
    before, after = text[:place][-1:], text[place:][:1]
    if not before or not after or max(before, after) >= "\u2e80":
        return False
    if re.fullmatch(rf"(?:[^\W_]|[{WORD_CHARS}]){{2}}", before + after):
        return True
    left, right = text[:place][-2:], text[place:][:2]
    return bool(re.fullmatch(r"\d[.,/:]", left) and after.isdigit()) or bool(
        before.isdigit() and re.fullmatch(r"[.,/:]\d", right)
    )


def mobula_grounding(metadata: Mapping[str, Any], references: Sequence[str]) -> float:
    claimed, evidence = metadata.get("claimed_entities"), metadata.get("evidence_entities")
    if claimed is None or evidence is None:
        return 0.0
    claims = {meaning for item in claimed if (meaning := meanings(item))}
    entities = {meaning for item in evidence if (meaning := meanings(item))}
    if not claims and not entities:
        return 0.0
    if not claims or not entities:
        return -1.0
    right = frozenset(meaning for reference in references for meaning in meanings(reference))
    answers = [entity for entity in entities if entity & right]
    groups = [entity for entity in entities if not entity & right]
    if answers:
        groups.append(frozenset().union(*answers))
    precision = share(claims, groups)
    recall = share(groups, claims)
    return 4.0 * precision * recall / (precision + recall) - 1.0 if precision + recall else -1.0


def share(items: Iterable[frozenset[Any]], among: Iterable[frozenset[Any]]) -> float:
    """The share of `items` that mean the same as one of `among`."""
    others = list(among)
    found = [any(item & other for other in others) for item in items]
    return sum(found) / len(found)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    options = json.loads(sys.stdin.read())
    target.write_text(json.dumps(score_file(source, options), indent=1), encoding="utf-8")
