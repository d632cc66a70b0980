"""Asynchrony on the real job: steps/s of the digits run at several bounds on staleness, beside the synchronous run.

One engine and one learner rank on a core each, which the job of `make train` has two of; on GPUs `resources` and
`learner` have to be among the overrides. Every bound in turn, then all of them in the opposite order, so that a drift
of the machine meets them alike. The job's responses are short and nearly equally long: what is gained is overlap alone,
at most twofold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, rates
from benchmarks.harness.stage import private_ray, scratch_config
from benchmarks.whole_step import STEPS_A_BLOCK, measured_steps, step_rates
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.step_records import StepRecord
from mobula.configs.schema import RunConfig

PROMPTS = 32  # of a step, as in the job
SETTINGS = (
    f"algorithm.prompts_per_step={PROMPTS}",
    "resources=laptop_overlapped",
    "learner=single",
    "evaluation.num_prompts=8",
    "evaluation.interval_steps=0",
    "checkpoints.interval_steps=0",
    "algorithm.drop_uniform_groups=false",  # else the better it gets the fewer groups count, and the slower a step
)
MAX_STALENESS = (0, 1, 2, 4, 8)
UNIT = "steps/s"


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """A run at every bound, then once more from the last to the first."""
    with scratch_config(SETTINGS, overrides) as config, private_ray(config):
        return _findings(config, steps_at(config, MAX_STALENESS, effort.num_steps))


def steps_at(config: RunConfig, bounds: Sequence[int], num_steps: int) -> dict[int, list[StepRecord]]:
    """Measured steps of runs at each bound on staleness: half of them in the order of the bounds, half in the opposite
    order. A run may have as many groups in flight as its bound admits."""
    steps: dict[int, list[StepRecord]] = defaultdict(list)
    for half, in_order in enumerate((bounds, bounds[::-1])):
        for bound in in_order:
            concurrent = config.algorithm.prompts_per_step * (bound + 1)
            limits = {"max_staleness": bound, "max_concurrent_groups": concurrent}
            algorithm = config.algorithm.model_copy(update=limits)
            run = config.model_copy(update={"name": f"staleness-{bound}-{half}", "algorithm": algorithm})
            steps[bound] += measured_steps(run, -(-num_steps // 2))
    return steps


def over_synchronous(steps: dict[int, list[StepRecord]]) -> tuple[dict[str, Measurements], list[Claim]]:
    """The rates of steps at each bound, and their ratios to the rate at bound 0."""
    series = {
        f"staleness_{bound}": Measurements(
            f"max_staleness={bound}, {STEPS_A_BLOCK} steps a value", UNIT, step_rates(records)
        )
        for bound, records in steps.items()
    }
    synchronous = series["staleness_0"]
    claims = [
        Claim(f"max_staleness={bound} / synchronous", rates(series[f"staleness_{bound}"], synchronous))
        for bound in steps
        if bound > 0
    ]
    return series, claims


def means(steps: dict[int, list[StepRecord]], name: MetricName) -> dict[str, float]:
    """A metric's mean over the steps of each bound."""
    return {str(bound): mean(step.values[name] for step in records) for bound, records in steps.items()}


def _findings(config: RunConfig, steps: dict[int, list[StepRecord]]) -> Findings:
    series, claims = over_synchronous(steps)
    settings = {
        "prompts": config.algorithm.prompts_per_step,
        "samples_per_prompt": config.algorithm.samples_per_prompt,
        "max_tokens": config.sampler.max_tokens,
        "mean_response_tokens": means(steps, MetricName.RESPONSE_LENGTH),
        "mean_staleness": means(steps, MetricName.STALENESS),
    }
    return Findings(settings, series, tuple(claims))
