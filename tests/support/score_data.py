"""Records to score offline: the six published rows, and a shorthand for everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mobula.configs.load import load_config
from mobula.rewards.offline.rows import open_source
from mobula.rewards.offline.scorer import ScoringOptions, score_source

LONG = " ".join(f"word{i}" for i in range(22))
AERORL = ("rewards=aerorl",)
PUBLISHED = (  # the options of aeroRL's value benchmark; its threshold is 0.5
    "rewards=aerorl",
    "rewards.components.0.weight=0.45",
    "rewards.components.3.weight=0.05",
    "rewards.components.2.options.require_json=true",
    r"rewards.components.2.options.regex_pattern='^\{.*\}$'",
    "rewards.components.3.options.target_tokens=32",
    "rewards.components.3.options.latency_budget_ms=400.0",
)


def record(
    id_: str | None, response: str, reference: Any, evidence: Any = None, claimed: Any = None, **metadata: Any
) -> dict[str, Any]:
    stated = {"evidence_entities": evidence, "claimed_entities": claimed, **metadata}
    return {
        "id": id_,
        "prompt": "What is it?",
        "response": response,
        "reference": reference,
        "metadata": {key: value for key, value in stated.items() if value is not None},
    }


def answer(text: str, **more: str) -> str:
    return json.dumps({"answer": text, **more})


SIX_ROWS = (
    record("ok-1", answer("stop"), "stop", ["stop"], ["stop"], latency_ms=80),
    record("format-bad-contains", "answer: red", "red", ["red"], ["red"], latency_ms=120),
    record("grounding-bad", answer("nike"), "adidas", ["adidas"], ["nike"], latency_ms=210),
    record("grounding-hidden", answer("nike"), "nike", ["adidas"], ["nike"], latency_ms=130),
    record("cost-bad", answer("cat", reasoning=LONG), "cat", ["cat"], ["cat"], latency_ms=1600),
    record("ok-2", answer("fragile"), "fragile", ["fragile"], ["fragile"], latency_ms=95),
)


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def options(words: Sequence[str], folder: Path, **changes: Any) -> ScoringOptions:
    rewards = load_config(words, is_complete=False).rewards
    least = {"timeout_s": 60.0, "pass_threshold": 0.5, "top_k": 3, "max_ids": 1000, "writes_rows": False}
    return ScoringOptions(rewards=rewards, folder=folder, **{**least, **changes})


def score_file(path: Path, words: Sequence[str], *, num_processes: int = 1, **changes: Any) -> dict[str, Any]:
    """The report of a file."""
    chosen = options(words, path.parent, **changes)
    source = open_source(path, needs_images=chosen.rewards.needs_images)
    summary = score_source(source, chosen, num_processes=num_processes)
    return summary.report(chosen.rewards.accuracy_component, chosen.pass_threshold)
