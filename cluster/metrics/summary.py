"""Summary: the result of a run in one small record, `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import BeforeAfter, strict

Status = Literal["done", "stopped", "failed", "killed"]  # a killed driver leaves no summary.json


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that are not metrics."""

    seed: int
    sampler: str
    learner_backend: str
    learner_ranks: int
    rollout_actors: int
    train_prompts: int | None  # of one epoch; None if the data were not read


@dataclass(frozen=True)
class Summary:
    """The whole run with its resumed parts. A number is None if it was not measured.

    `accuracy_before` is the held-out accuracy of the first evaluated version, `accuracy_after` of the newest later
    version; `counted_before` and `counted_after` say over how many prompts or responses. If the two were not evaluated
    in the same way, there is no `accuracy_before`, and `not_compared` says why. `seconds` sums each phase over all
    steps, with `other` and `total`; throughput refers to this total.
    `response_length` is the mean over trained responses, `rejected_length` over rejected responses by reason; a
    difference means that rejection has biased the lengths. Resumed parts store images again: `media_bytes_unique` is
    the maximum over the parts, `media_bytes_referenced` the sum.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    seed: int
    num_steps: int
    optimizer_steps: int
    samples_per_s: float | None
    tokens_per_s: float | None
    seconds: Mapping[str, float]
    logprob_gap_mean: float | None
    logprob_gap_max: float | None
    staleness: Mapping[int, int]
    weight_syncs: int
    restarts: int
    rejected: Mapping[str, int]
    response_length: float | None
    rejected_length: Mapping[str, float]
    over_age_tokens: int
    sampler: str
    learner_backend: str
    learner_ranks: int
    rollout_actors: int
    train_prompts: int | None
    media_bytes_unique: int | None
    media_bytes_referenced: int
    status: Status
    wall_s: float
    version: int
    skipped: Mapping[str, int]
    canary_max: float | None
    values_before: Mapping[str, float] = field(default_factory=dict)  # further metrics of the same evaluation
    values_after: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()  # why the run may have learned nothing, newest last
    start_up: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds, of the newest part of the run
    error: str = ""  # that ended the run, in one line: class, message and innermost stack frames
    counted_before: str = ""
    counted_after: str = ""
    not_compared: str = ""


def summarize(
    metrics: Metrics, facts: RunFacts, *, status: Status, version: int, wall_s: float, error: str = ""
) -> Summary:
    """Returns the summary of the current state of `metrics`; `error` ended the run."""
    totals = metrics.totals
    pair = BeforeAfter.of(totals.evaluations)
    before, after = pair.before, pair.after
    return Summary(
        accuracy_before=before.accuracy if before else None,
        accuracy_after=after.accuracy if after else None,
        seed=facts.seed,
        num_steps=totals.num_steps,
        optimizer_steps=totals.optimizer_steps,
        samples_per_s=totals.samples_per_s,
        tokens_per_s=totals.tokens_per_s,
        seconds=dict(totals.seconds),
        logprob_gap_mean=totals.logprob_gap_mean,
        logprob_gap_max=totals.maximum(MetricName.LOGPROB_GAP_MAX),
        staleness=dict(sorted(totals.staleness.items())),
        weight_syncs=sum(metrics.counts(CounterName.WEIGHT_SYNCS).values()),
        restarts=sum(metrics.counts(CounterName.RESTARTS).values()),
        rejected=metrics.counts(CounterName.REJECTED),
        response_length=totals.num_tokens / totals.num_samples if totals.num_samples else None,
        rejected_length=rejected_length(metrics),
        over_age_tokens=totals.over_age_tokens,
        sampler=facts.sampler,
        learner_backend=facts.learner_backend,
        learner_ranks=facts.learner_ranks,
        rollout_actors=facts.rollout_actors,
        train_prompts=facts.train_prompts,
        media_bytes_unique=_media_bytes_unique(metrics),
        media_bytes_referenced=totals.media_bytes_referenced,
        status=status,
        wall_s=wall_s,
        version=version,
        skipped=metrics.counts(CounterName.SKIPPED),
        canary_max=totals.maximum(MetricName.CANARY),
        values_before=dict(before.values) if before else {},
        values_after=dict(after.values) if after else {},
        warnings=tuple(metrics.warnings),
        start_up=dict(metrics.start_up.seconds),
        error=error,
        counted_before=before.counted if before else "",
        counted_after=after.counted if after else "",
        not_compared=pair.reason,
    )


def rejected_length(metrics: Metrics) -> dict[str, float]:
    """Returns reason -> mean tokens of the responses that were rejected for it."""
    tokens = metrics.counts(CounterName.REJECTED_TOKENS)
    return {reason: tokens[reason] / num for reason, num in metrics.counts(CounterName.REJECTED_RESPONSES).items()}


def write_summary(path: Path, summary: Summary) -> None:
    """Writes the summary atomically."""
    write_atomically(path, json.dumps(strict(asdict(summary)), indent=2, allow_nan=False) + "\n")


def read_summary(path: Path) -> Summary:
    """The inverse of `write_summary`."""
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = {f.name for f in fields(Summary)}
    later = {f.name for f in fields(Summary) if f.default is not MISSING or f.default_factory is not MISSING}
    if not known - later <= set(row) <= known:  # files of earlier versions have no later keys
        raise ValueError(f"{path} holds no summary: these keys are missing or unknown: {sorted(known ^ set(row))}")
    row["warnings"] = tuple(row.get("warnings", ()))
    row["staleness"] = {int(lag): tokens for lag, tokens in row["staleness"].items()}
    row |= {key: float(value) for key, value in row.items() if value in ("nan", "inf", "-inf")}
    return Summary(**row)


def _media_bytes_unique(metrics: Metrics) -> int | None:
    name = MetricName.MEDIA_BYTES_UNIQUE
    known = [value for value in (metrics.totals.maximum(name), metrics.observed(name)) if value is not None]
    return int(max(known)) if known else None
