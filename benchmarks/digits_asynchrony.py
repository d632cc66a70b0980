"""Asynchrony on the real job: steps/s of the digits run at several bounds on staleness, beside the synchronous run.

One engine and one learner rank on a core each, which the job of `make train` has two of; on GPUs `resources` and
`learner` have to be among the overrides. Every bound in turn, then all of them in the opposite order, so that a drift
of the machine meets them alike. The job's responses are short and nearly equally long: what is gained is overlap alone,
at most twofold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import mean

from benchmarks.measure import Claim, Effort, Findings, Series, rates
from benchmarks.stage import private_ray, scratch_config
from benchmarks.whole_step import STEPS_A_BLOCK, measured_steps, step_rates
from cluster.metrics.definitions import MetricName
from cluster.metrics.records import StepRecord
from configs.schema import RunConfig

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
    steps: dict[int, list[StepRecord]] = defaultdict(list)
    with ExitStack() as stack:
        configs = [stack.enter_context(scratch_config(_at(bound), overrides)) for bound in MAX_STALENESS]
        stack.enter_context(private_ray(configs[0]))
        for half, in_order in enumerate((configs, configs[::-1])):
            for config in in_order:
                run = config.model_copy(update={"name": f"half-{half}"})
                steps[config.algorithm.max_staleness] += measured_steps(run, -(-effort.num_steps // 2))
    return _findings(configs[0], steps)


def _at(bound: int) -> tuple[str, ...]:
    """Settings of a run; it may have as many groups under way as the bound admits."""
    return (*SETTINGS, f"algorithm.max_staleness={bound}", f"algorithm.max_concurrent_groups={PROMPTS * (bound + 1)}")


def _findings(config: RunConfig, steps: dict[int, list[StepRecord]]) -> Findings:
    series = {
        f"staleness_{bound}": Series(f"max_staleness={bound}, {STEPS_A_BLOCK} steps a value", UNIT, step_rates(records))
        for bound, records in steps.items()
    }
    settings = {
        "prompts": config.algorithm.prompts_per_step,
        "samples_per_prompt": config.algorithm.samples_per_prompt,
        "max_tokens": config.sampler.max_tokens,
        "mean_response_tokens": _means(steps, MetricName.RESPONSE_LENGTH),
        "mean_staleness": _means(steps, MetricName.STALENESS),
    }
    synchronous = series["staleness_0"]
    claims = [
        Claim(f"max_staleness={bound} / synchronous", rates(series[f"staleness_{bound}"], synchronous))
        for bound in MAX_STALENESS[1:]
    ]
    return Findings(settings, series, tuple(claims))


def _means(steps: dict[int, list[StepRecord]], name: MetricName) -> dict[str, float]:
    return {str(bound): mean(step.values[name] for step in records) for bound, records in steps.items()}
