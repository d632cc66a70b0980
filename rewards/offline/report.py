"""The report of an offline scoring as data: aeroRL's keys, and beside them where the two readings differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mobula.rewards.offline.options import ScoreOptions
from mobula.rewards.offline.partial import Partial, SchemeResults, ScoredRecord
from mobula.rewards.offline.rules.schemes import TOTAL_DIGITS, Scheme
from mobula.rewards.offline.scoring import VERDICT, SchemeScorer
from mobula.rewards.offline.sources.source import Source
from mobula.rewards.offline.tally import TOTAL

MANUAL_METHOD = "manual_contains_reference"


def build_report(
    whole: Partial, scorer: SchemeScorer, options: ScoreOptions, source: Source, *, primary: str
) -> dict[str, Any]:
    """The results of the `primary` scheme on top, the others under `others`, their disagreement under `differences`.

    Without any record it is aeroRL's report of nothing: zeros and empty lists, no threshold and no weights.
    """
    results = dict(zip([scheme.name for scheme in scorer.schemes], whole.schemes, strict=True))
    schemes = {scheme.name: scheme for scheme in scorer.schemes}
    found = {name: _scheme_report(whole, schemes[name], results[name]) for name in schemes}
    return {
        "semantics": primary,
        **found.pop(primary),
        "manual_baseline": {
            "method": MANUAL_METHOD,
            "pass_rate": _share(whole.num_manual_passes, whole.num_records),
            "num_passed": whole.num_manual_passes,
        },
        "input": _input(whole, source),
        "options": _options(options),
        "others": found,
        "differences": _differences(whole, scorer),
    }


def _scheme_report(whole: Partial, scheme: Scheme, results: SchemeResults) -> dict[str, Any]:
    """One scheme's results; rates are of the records that it scored."""
    tally, num = results.tally, results.tally.num_scored
    if not whole.num_records:
        nothing = {"average_reward": 0.0, "pass_rate": 0.0, "component_averages": {}}
        return {"count": 0, **nothing, "best_examples": [], "worst_examples": []}
    averages = {name: _rounded(tally.distributions[name].mean) for name in scheme.components}
    return {
        "count": whole.num_records,
        "average_reward": _rounded(tally.distributions[TOTAL].mean),
        "pass_rate": _share(tally.num_passed, num),
        "pass_threshold": scheme.pass_threshold,
        "component_averages": averages,
        "weights": dict(zip(scheme.components, scheme.weights, strict=True)),
        **({"weights_by_label": dict(scheme.weights_by_label)} if scheme.weights_by_label else {}),
        "best_examples": [_example(example, scheme.name) for example in results.best],
        "worst_examples": [_example(example, scheme.name) for example in results.worst],
        "num_scored": num,
        "unscored": dict(sorted(tally.unscored.items())),
        "diagnostics_found": {f"{name}_issues": tally.low[name] for name in scheme.low_marks},
        "improvement": _improvement(whole, scheme, results),
        "histograms": {
            name: {"low": d.low, "high": d.high, "counts": d.bins} for name, d in tally.distributions.items()
        },
    }


def _improvement(whole: Partial, scheme: Scheme, results: SchemeResults) -> dict[str, Any]:
    """Findings of the scheme that the manual baseline lacks; the named ids are the first ones in their order."""
    tally = results.tally
    manual_rate, rate = whole.num_manual_passes / whole.num_records, _ratio(tally.num_passed, tally.num_scored)
    num_dimensions = len(scheme.components)
    return {
        "pass_rate_delta": _rounded(rate - manual_rate),
        "observability_gain": {
            "manual_dimensions": 1,
            "aerorl_dimensions": num_dimensions,
            "multiplier": float(num_dimensions),
        },
        "manual_false_passes_caught": results.false_pass_ids,
        "quality_gate_gain": {
            "false_pass_rate": _rounded(tally.num_false_passes / max(1, whole.num_manual_passes)),
            "false_pass_count": tally.num_false_passes,
        },
    }


def _differences(whole: Partial, scorer: SchemeScorer) -> dict[str, Any]:
    first, second = (scorer.schemes[place] for place in scorer.compared)
    found = whole.disagreement
    names = [name for name in first.components if name in second.components]
    return {
        "between": [first.name, second.name],
        "num_records": {name: found.components[name] for name in [*names, TOTAL]},
        "verdicts": {
            f"passed_by_{first.name}_only": found.num_passed_by_first_only,
            f"passed_by_{second.name}_only": found.num_passed_by_second_only,
        },
        "examples": {
            name: [_both(example) for example in whole.disagreeing[name]]
            for name in [VERDICT, *names, TOTAL]
            if whole.disagreeing.get(name)
        },
    }


def _example(example: ScoredRecord, name: str) -> dict[str, Any]:
    return {
        "id": example.id,
        "total_reward": example.totals[name],
        "components": example.scores[name],
        "record": example.record,
        "prompt": example.prompt,
        "response": example.response,
        "references": list(example.references),
        "details": example.details[name],
    }


def _both(example: ScoredRecord) -> dict[str, Any]:
    shared = _example(example, next(iter(example.totals)))
    for key in ("total_reward", "components", "details"):
        del shared[key]
    rewards = {
        name: {"total_reward": total, "components": example.scores[name], "details": example.details[name]}
        for name, total in example.totals.items()
    }
    return {**shared, "rewards": rewards}


def _input(whole: Partial, source: Source) -> dict[str, Any]:
    broken = [{"line": line, "reason": reason} for line, reason in whole.broken]
    return {
        "path": str(source.path),
        "kind": source.kind,
        "num_records": whole.num_records,
        "num_broken": whole.num_broken,
        "broken": broken,
    }


def _options(options: ScoreOptions) -> Mapping[str, Any]:
    return {
        "require_json": options.require_json,
        "regex_pattern": options.regex_pattern,
        "target_tokens": options.target_tokens,
        "latency_budget_ms": options.latency_budget_ms,
        "top_k": options.top_k,
        "max_ids": options.max_ids,
    }


def _rounded(value: float) -> float:
    return round(value, TOTAL_DIGITS)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _share(part: int, whole: int) -> float:
    return _rounded(_ratio(part, whole))
