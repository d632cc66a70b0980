"""Malformed and constructed wrong answers for every rule: run with a number of answers, it prints what came out.

    python tests/unit/rewards/answers/fuzz_rewards.py 100000

An answer here is never right, by construction: a right one was changed in meaning, or garbage was made without the
characters that a right one needs. So a value of 1.0 is a defect, as is anything raised but a refusal, or a hang.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wrong_answers import WRONG, garbage

from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import RewardRequest, Score, ScoringFailure, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import Isolated, IsolatedPool
from mobula.rewards.tools import Tools

CORPUS = Path(__file__).parent / "reward_fixtures" / "corpus.jsonl"
BATCH = 100
HUGE = 10_000_000  # characters

_PIXELS = {"response_scale": "pixels", "scale": "pixels", "min_iou": 0.0}
RULES: dict[str, tuple[str, dict[str, Any]]] = {  # what is fuzzed -> function and options
    "math_boxed": ("math_answer", {"require_boxed": True}),
    "math_whole": ("math_answer", {"require_boxed": False}),
    "math_json": ("math_answer", {"extract": "fenced_json:answer"}),
    "exact_whole": ("exact_match", {"ignore_case": True, "whole_response": True}),
    "exact_anywhere": ("exact_match", {"ignore_case": True, "whole_response": False}),
    "exact_tags": ("exact_match", {"ignore_case": True, "whole_response": True, "extract": "tags:answer"}),
    "choice": ("multiple_choice", {"letters": "PQRS", "extract": "whole"}),
    "choice_last_line": ("multiple_choice", {"letters": "PQRS", "extract": "last_line"}),
    "anls_raw": ("anls", {"threshold": 0.5, "lengths": "raw", "extract": "whole"}),
    "anls_json": ("anls", {"threshold": 0.0, "lengths": "folded", "extract": "json:answer"}),
    "relaxed": ("relaxed_accuracy", {"tolerance": 0.05, "extract": "whole"}),
    "grounding": ("grounding", {"claims": "json:entities", "evidence": "evidence"}),
    "iou": ("iou", {"extract": "whole", "boxes": "boxes", "form": "xyxy", **_PIXELS}),
    "iou_json": ("iou", {"extract": "boxed", "boxes": "boxes", "form": "xywh", **_PIXELS}),
    "format_boxed": ("format", {"preset": "boxed"}),
    "format_tags": ("format", {"tags": ["think", "answer"]}),
    "format_json": ("format", {"json_fields": ["answer"]}),
    "format_pattern": ("format", {"pattern": r"q(\w+\s?)*q"}),
    "cost": ("cost", {"target_tokens": 10, "latency_budget_ms": 100}),
    "overlong": ("overlong", {"max_tokens": 100, "buffer_tokens": 50, "penalty": 1.0}),
    "language": ("language", {"language": "en", "among": ["en", "de", "fr", "zh"], "min_letters": 6}),
}
METADATA = {"evidence": ["zyzzyva", "48611"], "boxes": [123, 456, 345, 789], "latency_ms": 150.0}
REFERENCES: dict[str, tuple[str, ...]] = {"choice": ("Q",), "choice_last_line": ("(Q)",)}
RIGHT = ("48611", "zyzzyvaq")  # what the other rules are asked for: garbage has no q, and no 8


@dataclass
class Findings:
    """What came out, and every defect with the answer that shows it."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)

    def add(self, rule: str, text: str, outcome: Score | ScoringFailure, may_be_one: bool) -> None:
        kind = f"failure {outcome.kind}" if isinstance(outcome, ScoringFailure) else "value"
        self.outcomes.setdefault(rule, Counter())[kind] += 1
        if isinstance(outcome, Score) and outcome.value >= 1.0 and not may_be_one:
            self.defects.append(f"{rule} gave 1.0 to {text[:200]!r}")
        if isinstance(outcome, ScoringFailure) and "raised" in outcome.reason:
            self.defects.append(f"{rule}: {outcome.reason[:200]} for {text[:200]!r}")


def build(isolated: Isolated) -> dict[str, Any]:
    """Every rule that is fuzzed."""
    tools = Tools(isolated, "cpu", "float32")
    return {rule: build_function(name, options, tools) for rule, (name, options) in RULES.items()}


def asked(rule: str, text: str, references: Sequence[str] = (), **metadata: Any) -> RewardRequest:
    references = tuple(references) or REFERENCES.get(rule, RIGHT)
    return RewardRequest(Response(text, 12, False), references, {**METADATA, **metadata}, "")


def corpus(size: int) -> Iterator[list[str]]:
    """The committed texts: the short ones together, then each of those that are made of repetitions, `size` long."""
    entries = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    yield [entry for entry in entries if isinstance(entry, str)]
    for entry in entries:
        if isinstance(entry, dict):
            unit = entry["repeat"]
            yield [entry.get("before", "") + unit * (size // len(unit)) + entry.get("after", "")]


def fuzz_wrong(functions: dict[str, Any], num_answers: int, rng: random.Random, findings: Findings) -> None:
    """Right answers whose meaning was changed: none may get 1.0."""
    cases: dict[str, list[tuple[str, RewardRequest]]] = {rule: [] for rule in RULES}
    makers: dict[str, Callable[[random.Random], Any]] = {rule: WRONG[rule] for rule in RULES if rule in WRONG}
    for index in range(num_answers):
        rule = list(makers)[index % len(makers)]
        made = makers[rule](rng)
        cases[rule].append((made.text, asked(rule, made.text, made.references, **made.metadata)))
    _score(functions, cases, findings, may_be_one=())


def fuzz_garbage(functions: dict[str, Any], num_answers: int, rng: random.Random, findings: Findings) -> None:
    """Texts that are no answer to anything."""
    cases: dict[str, list[tuple[str, RewardRequest]]] = {rule: [] for rule in RULES}
    for index in range(num_answers):
        rule = list(RULES)[index % len(RULES)]
        text = garbage(rng)
        cases[rule].append((text, asked(rule, text)))
    _score(functions, cases, findings, may_be_one=MAY_BE_ONE)


def fuzz_corpus(functions: dict[str, Any], size: int, findings: Findings) -> None:
    """Every text of the corpus for every one of the functions."""
    for texts in corpus(size):
        cases = {rule: [(text, asked(rule, text)) for text in texts] for rule in functions}
        _score(functions, cases, findings, may_be_one=MAY_BE_ONE)


MAY_BE_ONE = ("format_boxed", "format_tags", "format_json", "format_pattern", "language")  # whatever the answer


def _score(
    functions: dict[str, Any],
    cases: dict[str, list[tuple[str, RewardRequest]]],
    findings: Findings,
    may_be_one: Sequence[str],
) -> None:
    for rule, texts in cases.items():
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            started = time.monotonic()
            outcomes = evaluate_batch(functions[rule], [request for _, request in batch])
            findings.slowest_s[rule] = max(findings.slowest_s.get(rule, 0.0), time.monotonic() - started)
            for (text, _), outcome in zip(batch, outcomes, strict=True):
                findings.add(rule, text, outcome, rule in may_be_one)


def main(num_answers: int, seed: int, size: int) -> int:
    """Fuzz, print what came out, and return how many defects there are."""
    pool = IsolatedPool(num_processes=2, timeout_s=5, start_timeout_s=120)
    functions, findings, rng = build(pool), Findings(), random.Random(seed)
    started = time.monotonic()
    fuzz_wrong(functions, num_answers // 2, rng, findings)
    fuzz_garbage(functions, num_answers - num_answers // 2, rng, findings)
    middle = time.monotonic()
    slowest = dict(findings.slowest_s)
    findings.slowest_s.clear()
    fuzz_corpus(functions, size, findings)
    pool.close()
    for rule, kinds in findings.outcomes.items():
        print(f"{rule:18} {dict(kinds)}; slowest {slowest[rule]:.2f} s, of the corpus {findings.slowest_s[rule]:.2f} s")
    print(f"{num_answers} answers took {middle - started:.0f} s, the corpus {time.monotonic() - middle:.0f} s")
    print(f"{len(findings.defects)} defects", *findings.defects[:40], sep="\n")
    return len(findings.defects)


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    sys.exit(bool(main(*arguments, *(3000, 0, HUGE)[len(arguments) :])))
