"""Whole step at 8 prompts x 8 samples x 8 tokens: response tokens/s of the loop over what its raw parts allow.

The parts one after the other (their serial sum) bound the synchronous loop; with one engine and one learner rank on a
core each, side by side, the slower of the two (the overlapped limit) bounds the asynchronous one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean
from typing import Protocol

from rich.console import Console

from benchmarks.harness.idle import wait_until_idle
from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, serial_rate, share
from benchmarks.harness.stage import private_ray, scratch_config, staged
from benchmarks.raw.raw_step import GENERATE, ONE_CORE_ENGINE, ONE_CORE_TRAINER, TRAIN, WHAT, RawStep, raw_step
from mobula.cluster.errors import MobulaError
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.metrics.step_records import EvaluationRecord, StepRecord
from mobula.configs.schema import RunConfig
from mobula.deploy.run.runtime import run_training

PROMPTS, SAMPLES = 8, 8
SETTINGS = (  # a random model hardly ever stops before its 8 tokens are full, and hardly learns to at this rate
    f"algorithm.prompts_per_step={PROMPTS}",
    f"algorithm.samples_per_prompt={SAMPLES}",
    "sampler.max_tokens=8",
    "algorithm.kl.coef=0",
    "learner.learning_rate=1e-6",
    "warm_start.num_steps=0",
    "evaluation.num_prompts=8",
    "checkpoints.interval_steps=0",
)
ROLES = ("rollout", "reward")
NUM_WARMUP_STEPS = 5
STEPS_A_BLOCK = 5  # one value of the loop's series
STEPS_AFTER_PAUSE = 3  # not measured: what was sampled ahead while the loop stood still has to be used up
OVERLAPPED = ("resources=laptop_overlapped", "learner=single", "algorithm.max_staleness=1")
THREADS = (1, 2)  # of the raw trainer
TARGET = 0.6
OVERLAPPED_TARGET = 0.75
UNIT = "tokens/s"
LOOPS = {
    "staleness_0": "max_staleness=0",
    "staleness_1": "max_staleness=1",
    "overlapped": "max_staleness=1, one engine on one core and one learner rank on the other",
}
TIMES_AS_LONG = {"overlapped": 3}  # its target is closer than its blocks are to each other (0.66 to 0.89)


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One loop after the other; each stands still every few steps, while the raw parts are measured on its idle cores.

    A block of steps is compared with the raw parts right before and right after it, so that a drift of the machine
    meets both alike.
    """
    num_blocks = -(-effort.num_steps // STEPS_A_BLOCK)
    with ExitStack() as stack:
        config = stack.enter_context(scratch_config(SETTINGS, overrides))
        overlapped = stack.enter_context(scratch_config((*SETTINGS, *OVERLAPPED), overrides))
        stack.enter_context(private_ray(config))
        loops = {f"staleness_{staleness}": _with_staleness(config, staleness) for staleness in (0, 1)}
        if config.resources.device == "cpu":
            loops["overlapped"] = overlapped
        blocks_of = {name: num_blocks * TIMES_AS_LONG.get(name, 1) for name in loops}
        num_measurements = sum(n + 1 for n in blocks_of.values())
        raw = asyncio.run(raw_parts(config, PROMPTS, num_measurements, THREADS, stack))
        found = {name: in_blocks(loop, raw, blocks_of[name]) for name, loop in loops.items()}
    return _findings(config, found)


class RawParts(Protocol):
    """tokens/s of each raw part, named as in `raw_step.WHAT`, measured now."""

    def measure(self) -> Mapping[str, float]: ...


@dataclass
class Blocks:
    """Measured steps of one loop, block by block, and the raw parts before each block and after the last.

    As a sink of the run it has the loop wait while it measures the raw parts.
    """

    raw: RawParts
    num_blocks: int
    settle: Callable[[], None] = wait_until_idle  # the engines first finish the groups that were sampled ahead
    steps: list[list[StepRecord]] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)  # tokens/s by part
    name: str = "raw parts"

    @property
    def num_steps(self) -> int:
        """Of the run; the last holds the final evaluation and checkpoint."""
        return NUM_WARMUP_STEPS + self.num_blocks * (STEPS_AFTER_PAUSE + STEPS_A_BLOCK) + 1

    def emit(self, record: StepRecord) -> None:
        block, place = divmod(record.step - NUM_WARMUP_STEPS - 1, STEPS_AFTER_PAUSE + STEPS_A_BLOCK)
        if 0 <= block < self.num_blocks and place >= STEPS_AFTER_PAUSE:
            self.steps[block].append(record)
        if record.step >= NUM_WARMUP_STEPS and place == STEPS_AFTER_PAUSE + STEPS_A_BLOCK - 1:
            self.settle()
            self.parts.append(self.raw.measure())
            self.steps.append([])

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        """Evaluations are not measured."""

    def close(self) -> None:
        """There is nothing to close."""

    @property
    def rates(self) -> tuple[float, ...]:
        """tokens/s of each block."""
        return tuple(map(_token_rate, self.steps[: self.num_blocks]))

    def around(self, block: int) -> dict[str, float]:
        """tokens/s of each part, right before and right after a block."""
        before, after = self.parts[block : block + 2]
        return {part: mean((before[part], after[part])) for part in before}

    @property
    def serial(self) -> tuple[float, ...]:
        """tokens/s of the fastest way to generate and the fastest to train, one after the other, at each block."""
        return tuple(
            serial_rate(tuple(max(r for part, r in around.items() if part.startswith(p)) for p in (GENERATE, TRAIN)))
            for around in map(self.around, range(self.num_blocks))
        )

    @property
    def limit(self) -> tuple[float, ...]:
        """tokens/s of the slower of an engine and a trainer with a core each, at each block."""
        found = map(self.around, range(self.num_blocks))
        return tuple(min(around[ONE_CORE_ENGINE], around[ONE_CORE_TRAINER]) for around in found)


async def raw_parts(
    config: RunConfig, num_prompts: int, num_measurements: int, threads: Sequence[int], stack: ExitStack
) -> RawStep:
    """The raw parts of steps of `num_prompts`, warmed up; they live as long as `stack`, and the cluster is free."""
    async with staged(config, ROLES) as stage:
        raw = stack.enter_context(raw_step(stage, num_prompts, num_measurements + 1, threads))
    raw.measure()
    return raw


def in_blocks(config: RunConfig, raw: RawParts, num_blocks: int) -> Blocks:
    """Run the loop for `num_blocks` measured blocks of steps.

    Raises:
        MobulaError: the raw parts could not be measured.
    """
    blocks = Blocks(raw, num_blocks)
    run_training(config.model_copy(update={"num_steps": blocks.num_steps}), Console(stderr=True), [blocks])
    if len(blocks.parts) != num_blocks + 1:  # a sink that fails is dropped
        raise MobulaError("the raw parts could not be measured: the log of the run says why")
    return blocks


def _with_staleness(config: RunConfig, max_staleness: int) -> RunConfig:
    algorithm = config.algorithm.model_copy(update={"max_staleness": max_staleness})
    return config.model_copy(update={"name": f"staleness-{max_staleness}", "algorithm": algorithm})


def measured_steps(config: RunConfig, num_steps: int) -> list[StepRecord]:
    """A real run's steps in its steady state.

    Warm-up is left out, and at both ends as many steps as may be sampled ahead: the first ones find groups that were
    sampled before training began, the last ones train while nothing more is sampled. The very last step also holds
    the final evaluation and checkpoint.
    """
    ahead = config.algorithm.max_staleness
    first = NUM_WARMUP_STEPS + ahead
    run = config.model_copy(update={"num_steps": first + num_steps + ahead + 1})
    run_training(run, Console(stderr=True))
    return list(read_run_folder(run.run_folder).steps[first : first + num_steps])


def step_rates(steps: Sequence[StepRecord]) -> tuple[float, ...]:
    """steps/s over every few steps, so that what happens only in some of them is in every value."""
    blocks = [steps[start : start + STEPS_A_BLOCK] for start in range(0, len(steps), STEPS_A_BLOCK)]
    return tuple(map(_rate, blocks))


def _rate(steps: Sequence[StepRecord]) -> float:
    """steps/s."""
    return len(steps) / _seconds(steps)


def _token_rate(steps: Sequence[StepRecord]) -> float:
    """Response tokens/s."""
    return sum(step.values[MetricName.NUM_TOKENS] for step in steps) / _seconds(steps)


def _seconds(steps: Sequence[StepRecord]) -> float:
    return sum(step.seconds["total"] for step in steps)


def _findings(config: RunConfig, found: Mapping[str, Blocks]) -> Findings:
    parts = [measured for blocks in found.values() for measured in blocks.parts]
    series = {part: Measurements(WHAT[part], UNIT, tuple(rates[part] for rates in parts)) for part in parts[0]}
    for name, blocks in found.items():
        text = f"the loop, {LOOPS[name]}, {STEPS_A_BLOCK} steps a value"
        series[f"loop_{name}"] = Measurements(text, UNIT, blocks.rates)
        series[f"serial_{name}"] = Measurements("the serial sum of the raw parts around it", UNIT, blocks.serial)
    claims = [
        Claim("loop / serial sum of raw parts", share(found["staleness_0"].rates, found["staleness_0"].serial), TARGET),
        Claim("loop with max_staleness=1 / serial sum", share(found["staleness_1"].rates, found["staleness_1"].serial)),
    ]
    if "overlapped" in found:
        blocks = found["overlapped"]
        series["limit_overlapped"] = Measurements("the overlapped limit of the raw parts around it", UNIT, blocks.limit)
        reached = share(blocks.rates, blocks.limit)
        claims.append(Claim("overlapped loop / overlapped limit of raw parts", reached, OVERLAPPED_TARGET))
        claims.append(Claim("overlapped loop / serial sum", share(blocks.rates, blocks.serial)))
    steps = {name: [step for block in blocks.steps for step in block] for name, blocks in found.items()}
    settings = {
        "prompts": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_tokens": config.sampler.max_tokens,
        "mean_response_tokens": mean(s.values[MetricName.RESPONSE_LENGTH] for run in steps.values() for s in run),
        "learner_ranks": config.resources.learner.num_workers,
        "rollout_actors": config.resources.rollout.num_workers,
        "seconds_of_a_step": {name: mean_phases(records) for name, records in steps.items()},
    }
    return Findings(settings, series, tuple(claims))


def mean_phases(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Phase -> mean seconds."""
    names = {phase for step in steps for phase in step.seconds}
    return {name: mean(step.seconds[name] for step in steps if name in step.seconds) for name in sorted(names)}
