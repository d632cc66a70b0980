"""Rehearsals: predictions of `mobula rehearse` over real runs on this machine, at several lengths and bounds.

Speeds are fitted to synchronous runs of two lengths, two batch sizes and two numbers of ranks. The other runs are
predicted from them: steps/s, the share of a step in which the learner waits, and the distribution of staleness. All
runs in turn, then once more in the opposite order, so that a drift of the machine meets them alike. A policy of random
weights answers up to the length limit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements
from benchmarks.harness.stage import private_ray, scratch_config
from benchmarks.whole_step import measured_steps
from mobula.cluster.metrics.step_records import StepRecord
from mobula.configs.schema import RunConfig
from mobula.deploy.rehearsal.command import RehearseCommand, mean_prompt_tokens, staged
from mobula.deploy.rehearsal.simulated.machine import RecordedLengths
from mobula.deploy.rehearsal.speeds import MeasuredRun, measured_speeds
from mobula.deploy.rehearsal.stage import result_of

SETTINGS = (
    "resources=laptop",
    "warm_start.num_steps=0",
    "evaluation.num_prompts=8",
    "evaluation.interval_steps=0",
    "checkpoints.interval_steps=0",
)
LONG, SHORT = "sampler.max_tokens=48", "sampler.max_tokens=16"
ONE_RANK = "resources.learner.num_workers=1"
FITTED = {
    "short": (SHORT,),
    "long": (LONG,),
    "half a batch": (LONG, "algorithm.prompts_per_step=16"),
    "one rank, long": (LONG, ONE_RANK),
}
PREDICTED = {
    "middle": ("sampler.max_tokens=32",),
    "one rank": ("sampler.max_tokens=32", ONE_RANK),
    "staleness 1": (LONG, "algorithm.max_staleness=1"),
    "staleness 2": (LONG, "algorithm.max_staleness=2"),
    "short, staleness 2": (SHORT, "algorithm.max_staleness=2"),
}
MAX_RATIO, MAX_WAIT, MAX_STALENESS = 1.15, 0.1, 0.1
STATED = ("decode_step_s=1", "learner_tokens_per_s=1")  # replaced by fitted ones
UNIT = "steps/s"


@dataclass(frozen=True)
class Outline:
    """The figures of a run that are compared with its prediction."""

    steps_per_s: float
    wait_share: float
    staleness: Mapping[int, float]  # lag -> share of trained tokens

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> Outline:
        total = sum(step.seconds["total"] for step in steps)
        tokens = Counter[int]()
        for step in steps:
            tokens.update(step.staleness)
        return cls(
            len(steps) / total,
            sum(step.seconds["wait_for_rollouts"] for step in steps) / total,
            {lag: num / tokens.total() for lag, num in tokens.items()},
        )


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Runs all configurations, fits the speeds and rehearses the others."""
    runs = {**FITTED, **dict(list(PREDICTED.items())[: 1 if effort == QUICK else None])}
    found: defaultdict[str, list[StepRecord]] = defaultdict(list)
    configs: dict[str, RunConfig] = {}
    for names in (list(runs), list(runs)[::-1]):
        for name in names:
            with scratch_config([*SETTINGS, *runs[name]], overrides) as config, private_ray(config):
                configs[name] = config
                found[name] += measured_steps(config, -(-effort.num_steps // 2))
    fitted = [MeasuredRun.of(configs[name], found[name]) for name in FITTED]
    real = {name: Outline.of(steps) for name, steps in found.items()}
    rehearsed = {name: _rehearsed(fitted, found[name], [*runs[name], *overrides]) for name in runs}
    return _findings(real, rehearsed, effort)


def _rehearsed(fitted: Sequence[MeasuredRun], steps: Sequence[StepRecord], words: Sequence[str]) -> Outline:
    command = RehearseCommand(
        overrides=["experiment=digits", *SETTINGS, *words], words=STATED, num_steps=max(8, len(steps))
    )
    with staged(command) as (stage, _):
        lengths = RecordedLengths(
            [round(step.values["response_length"]) for step in steps], stage.config.sampler.max_tokens, 0
        )
        speeds = measured_speeds(fitted, mean_prompt_tokens(stage.prepared))
        stage = replace(stage, speeds=speeds, lengths=lengths)
        result = result_of(stage, stage.play())
    return Outline(1 / result.step_s, result.wait_share, result.staleness)


def _findings(real: Mapping[str, Outline], rehearsed: Mapping[str, Outline], effort: Effort) -> Findings:
    series, claims = {}, []
    for name, outline in real.items():
        ours = rehearsed[name]
        series[name] = Measurements("real run", UNIT, (outline.steps_per_s,))
        series[f"{name}, rehearsed"] = Measurements("rehearsal", UNIT, (ours.steps_per_s,))
        series[f"{name}, wait"] = Measurements("share of a step, real", "share", (outline.wait_share,))
        series[f"{name}, wait rehearsed"] = Measurements("share of a step, rehearsed", "share", (ours.wait_share,))
        if name in FITTED:
            continue
        off = max(outline.steps_per_s / ours.steps_per_s, ours.steps_per_s / outline.steps_per_s)
        claims.append(Claim(f"{name}: steps/s, the larger over the smaller", off, MAX_RATIO, at_least=False))
        wait = abs(outline.wait_share - ours.wait_share)
        claims.append(Claim(f"{name}: wait share, difference", wait, MAX_WAIT, at_least=False))
        lags = outline.staleness.keys() | ours.staleness.keys()
        stale = max(abs(outline.staleness.get(lag, 0.0) - ours.staleness.get(lag, 0.0)) for lag in lags)
        claims.append(Claim(f"{name}: staleness, largest difference", stale, MAX_STALENESS, at_least=False))
    return Findings({"steps_of_a_run": effort.num_steps}, series, tuple(claims))
