"""Records to score offline: the six published rows, and a shorthand for everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mobula.rewards.offline.evaluation import evaluate
from mobula.rewards.offline.options import DEFAULT_WEIGHTS, ScoreOptions
from mobula.rewards.offline.report import build_report
from mobula.rewards.offline.rules.schemes import built_in_schemes
from mobula.rewards.offline.scoring import SchemeScorer
from mobula.rewards.offline.sources.jsonl import stretches
from mobula.rewards.offline.sources.source import Source

LONG = " ".join(f"word{i}" for i in range(22))
PUBLISHED_OPTIONS: Mapping[str, Any] = {
    "weights": {"verifier": 0.45, "grounding": 0.3, "format": 0.2, "cost": 0.05},
    "require_json": True,
    "regex_pattern": r"^\{.*\}$",
    "target_tokens": 32,
    "latency_budget_ms": 400,
    "pass_threshold": 0.5,
}


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


def options(**changes: Any) -> ScoreOptions:
    least = {"weights": DEFAULT_WEIGHTS, "require_json": False, "regex_pattern": "", "target_tokens": 128}
    least |= {"latency_budget_ms": 500.0, "pass_threshold": 0.3, "top_k": 3, "max_ids": 1000}
    return ScoreOptions(**{**least, **changes})


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def score_file(
    path: Path, chosen: ScoreOptions, *, primary: str = "mobula", num_processes: int = 1, num_bytes: int | None = None
) -> dict[str, Any]:
    """The report of a JSONL file."""
    source = Source(path, "jsonl", "bytes", stretches(path, num_bytes))
    scorer = SchemeScorer(built_in_schemes(chosen), chosen, compared=(1, 0), writes_rows=False)
    whole = evaluate(source, scorer, chosen, num_processes=num_processes, timeout_s=60)
    return build_report(whole, scorer, chosen, source, primary=primary)


def score_rows(tmp_path: Path, rows: Sequence[Any], **changes: Any) -> dict[str, Any]:
    """The report of rows, aeroRL's results under `others`."""
    return score_file(write_jsonl(tmp_path / "rows.jsonl", rows), options(**changes))
