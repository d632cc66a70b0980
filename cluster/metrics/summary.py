"""Summary of a run, and statistics of its evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import BeforeAfter, ControlGain, strict

NUM_RESAMPLES = 1000
Z_95 = 1.959964  # two-sided 95 % quantile of the normal distribution


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """Returns the 95 % score interval of a share of `num` independent trials (Wilson 1927).

        (share + z^2 / 2n  -+  z * sqrt(share * (1 - share) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    It stays within [0, 1] and has a width even at 0 and 1. For a mean of values within [0, 1] it is conservative.
    """
    z2 = Z_95 * Z_95
    centre = share + z2 / (2 * num)
    half = Z_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    scale = 1 + z2 / num
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def interval_of_mean(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of independent `values` [N]: Wilson's if all are in [0, 1], else a
    bootstrap."""
    if all(0 <= value <= 1 for value in values):
        return wilson_interval(math.fsum(values) / len(values), len(values))
    return bootstrap_interval(values, seed)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that one of `k` responses is correct (Chen et al. 2021,
    arXiv:2107.03374).

        1 - C(n - c, k) / C(n, k)    for c correct responses of n >= k
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} responses is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks(num_samples: int) -> list[int]:
    """Returns the k of the reported pass@k: powers of two below `num_samples`, and `num_samples`."""
    return [*(2**i for i in range(num_samples.bit_length()) if 2**i < num_samples), num_samples]


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval (Efron 1979) of the mean of `values` [N], one per prompt or seed.
    It is deterministic; a single value gives an interval of width 0."""
    samples = np.asarray(values, dtype=np.float64)  # [N]
    random = np.random.default_rng(seed)
    means = samples[random.integers(0, samples.size, size=(NUM_RESAMPLES, samples.size))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of paired differences [N]. Differences of right and wrong answers, -1, 0 or
    1, have that of Agresti and Min (2005, Statistics in Medicine 24), which adds half a pair to each cell of the table;
    others Student's."""
    values = np.asarray(differences, dtype=np.float64)
    num = values.size
    if np.isin(values, (-1.0, 0.0, 1.0)).all():
        better, worse, num = (values > 0).sum() + 0.5, (values < 0).sum() + 0.5, num + 2
        mean = float(better - worse) / num
        half = Z_95 * math.sqrt(better + worse - (better - worse) ** 2 / num) / num
        return max(-1.0, mean - half), min(1.0, mean + half)
    return student_interval(differences)


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns Student's 95 % interval of the mean of `values` [N]; without width for a single value."""
    from scipy.stats import t  # slow import

    mean, error = mean_and_error(values)
    half = float(t.ppf(0.975, len(values) - 1)) * error if len(values) > 1 else 0.0
    return mean - half, mean + half


def mcnemar(better: int, worse: int) -> float:
    """Returns the two-sided p-value of McNemar's exact test: of the pairs that differ, half would be better by chance
    (McNemar 1947)."""
    num = better + worse
    tail = sum(math.comb(num, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**num)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of `values` [N], one per prompt, and its standard error std / sqrt(N) with N - 1 degrees of
    freedom; 0 for a single value."""
    samples = np.asarray(values, dtype=np.float64)
    if samples.size < 2:
        return float(samples.mean()), 0.0
    return float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(samples.size))


def paired_gains(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Returns the gain of each component between two evaluations of the same prompts with the same seeds.

    Arguments map prompt -> component -> mean over the responses. The result has `NAME_mean` and its standard error
    `NAME_se` of `after`, and `NAME_gain` and `NAME_gain_se` of the differences by prompt, from which the difficulty of
    prompts cancels. Components that some prompt of `after` lacks are left out.
    """
    gains: dict[str, float] = {}
    names = set.intersection(*({*components} for components in after.values())) if after else set()
    for name in sorted(names):
        gains[f"{name}_mean"], gains[f"{name}_se"] = mean_and_error([after[prompt][name] for prompt in after])
        both = [p for p in after if name in before.get(p, {})]
        if both:
            gain, error = mean_and_error([after[p][name] - before[p][name] for p in both])
            gains |= {f"{name}_gain": gain, f"{name}_gain_se": error}
    return gains


def reflection_ratios(correct: Sequence[bool], reflects: Sequence[bool]) -> dict[str, float]:
    """Returns how often responses reflect, and how often reflecting responses are correct (MAYE, arXiv:2504.02587).

    `correct` and `reflects` are [N], in the same order. A ratio over no response is 0.
    """
    both = sum(c and r for c, r in zip(correct, reflects, strict=True))
    num, num_correct, num_reflecting = len(correct), sum(correct), sum(reflects)
    return {
        "reflection_ratio": _ratio(num_reflecting, num),
        "reflection_ratio_in_correct": _ratio(both, num_correct),
        "reflection_ratio_in_incorrect": _ratio(num_reflecting - both, num - num_correct),
        "correct_ratio": _ratio(num_correct, num),
        "correct_ratio_in_reflection": _ratio(both, num_reflecting),
        "correct_ratio_in_no_reflection": _ratio(num_correct - both, num - num_reflecting),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


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
class Summary(RunFacts):
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
    media_bytes_unique: int | None
    media_bytes_referenced: int
    status: Status
    wall_s: float
    version: int
    skipped: Mapping[str, int]
    canary_max: float | None
    values_before: Mapping[str, float] = field(default_factory=dict)  # further metrics of the same evaluation
    values_after: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # why the run may have learned nothing, newest last
    start_up: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds, of the newest part of the run
    error: str = ""  # that ended the run, in one line: class, message and innermost stack frames
    counted_before: str = ""
    counted_after: str = ""
    not_compared: str = ""
    measure: str = "accuracy"  # what the mean of the evaluations is called
    controls: tuple[ControlGain, ...] = ()  # of the newest evaluation, the best control first


def summarize(
    metrics: Metrics, facts: RunFacts, *, status: Status, version: int, wall_s: float, error: str = ""
) -> Summary:
    """Returns the summary of the current state of `metrics`; `error` ended the run."""
    totals, total_s = metrics.totals, metrics.totals.seconds["total"]
    pair = BeforeAfter.of(totals.evaluations)
    before, after = pair.before, pair.after
    newest = after or before
    return Summary(
        measure=newest.measure if newest else "accuracy",
        controls=tuple(sorted(newest.controls, key=lambda each: each.gain)) if newest else (),
        accuracy_before=before.accuracy if before else None,
        accuracy_after=after.accuracy if after else None,
        **asdict(facts),
        num_steps=totals.num_steps,
        optimizer_steps=totals.optimizer_steps,
        samples_per_s=totals.num_samples / total_s if total_s > 0 else None,
        tokens_per_s=totals.num_tokens / total_s if total_s > 0 else None,
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
    tokens = metrics.counts(CounterName.REJECTED_TOKENS)
    return {reason: tokens[reason] / num for reason, num in metrics.counts(CounterName.REJECTED_RESPONSES).items()}


def write_summary(path: Path, summary: Summary) -> None:
    write_atomically(path, json.dumps(strict(asdict(summary)), indent=2, allow_nan=False) + "\n")


def read_summary(path: Path) -> Summary:
    """The inverse of `write_summary`."""
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = {f.name for f in fields(Summary)}
    later = {f.name for f in fields(Summary) if f.default is not MISSING or f.default_factory is not MISSING}
    if not known - later <= set(row) <= known:  # files of earlier versions have no later keys
        raise ValueError(f"{path} holds no summary: these keys are missing or unknown: {sorted(known ^ set(row))}")
    return TypeAdapter(Summary).validate_python(row)


def _media_bytes_unique(metrics: Metrics) -> int | None:
    name = MetricName.MEDIA_BYTES_UNIQUE
    known = [value for value in (metrics.totals.maximum(name), metrics.observed(name)) if value is not None]
    return int(max(known)) if known else None
