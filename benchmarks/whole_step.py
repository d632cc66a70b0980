"""Whole step at 8 prompts x 8 samples x 8 tokens: samples/s of the loop over what its raw parts allow.

The parts one after the other (their serial sum) bound the synchronous loop; with one engine and one learner rank on a
core each, side by side, the slower of the two (the overlapped limit) bounds the asynchronous one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np
from rich.console import Console

from benchmarks.apart import Peer
from benchmarks.measure import Claim, Effort, Findings, Series, Side, interleave, serial_rate
from benchmarks.raw_trainer import Rows, StepJob, raw_trainer, rows_of
from benchmarks.raw_vllm import Generated, GenerateJob, RawPrompt, raw_engine, settings_of
from benchmarks.stage import Stage, private_ray, scratch_config, staged
from cluster.media import MediaReader
from cluster.metrics.definitions import MetricName
from cluster.metrics.records import StepRecord
from cluster.metrics.run_folder import read_run_folder
from cluster.placement import PlacedWorker
from cluster.trajectory import Prompt
from configs.schema import RunConfig
from deploy.preparation import Prepared
from deploy.runtime import run_training

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
CALLS = 4  # generate calls, each of a whole step's fresh prompts, in one measurement
TRAIN_STEPS = 4  # optimizer steps in one measurement
OVERLAPPED = ("resources=laptop_overlapped", "learner=single", "algorithm.max_staleness=1")
TARGET = 0.6
OVERLAPPED_TARGET = 0.75
UNIT = "samples/s"
LOOPS = {
    "staleness_0": "max_staleness=0",
    "staleness_1": "max_staleness=1",
    "overlapped": "max_staleness=1, one engine on one core and one learner rank on the other",
}


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """The raw parts, and between them one loop after the other, all on the same cores and never two at a time.

    A loop is compared with the raw parts right before and after it, so that a drift of the machine meets both alike.
    """
    steps: dict[str, list[StepRecord]] = {}
    part = replace(effort, repeats=-(-effort.repeats // 2), warmups=1)
    with ExitStack() as stack:
        config = stack.enter_context(scratch_config(SETTINGS, overrides))
        overlapped = stack.enter_context(scratch_config((*SETTINGS, *OVERLAPPED), overrides))
        stack.enter_context(private_ray(config))
        loops = {f"staleness_{staleness}": _with_staleness(config, staleness) for staleness in (0, 1)}
        if config.resources.device == "cpu":
            loops["overlapped"] = overlapped
        raw = [asyncio.run(_raw_parts(part, config))]
        for name, loop in loops.items():
            steps[name] = measured_steps(loop, effort.num_steps)
            raw.append(asyncio.run(_raw_parts(part, config)))
    return _findings(config, raw, steps)


def _with_staleness(config: RunConfig, max_staleness: int) -> RunConfig:
    algorithm = config.algorithm.model_copy(update={"max_staleness": max_staleness})
    return config.model_copy(update={"name": f"staleness-{max_staleness}", "algorithm": algorithm})


def measured_steps(config: RunConfig, num_steps: int) -> list[StepRecord]:
    """A real run's steps that are neither warm-up nor the last, which holds the final evaluation and checkpoint."""
    run = config.model_copy(update={"num_steps": NUM_WARMUP_STEPS + num_steps + 1})
    run_training(run, Console(stderr=True))
    return list(read_run_folder(run.run_folder).steps[NUM_WARMUP_STEPS:-1])


async def _raw_parts(effort: Effort, config: RunConfig) -> dict[str, tuple[float, ...]]:
    """Part -> samples/s, each part alone on the machine."""
    async with staged(config, ROLES) as stage:
        rounds = stage.prompts((effort.warmups + effort.repeats) * CALLS, PROMPTS)
        generating = _Generating(stage.prepared, rounds)
        found: dict[str, tuple[float, ...]] = {}
        for name, engines in _engines(stage).items():
            with ExitStack() as stack:
                generating.engines = [stack.enter_context(raw_engine(stage.prepared, worker)) for worker in engines]
                found |= await interleave({name: generating.run}, effort)
        rows = rows_of(rounds[-1], generating.responses, MediaReader(timeout_s=60, max_items=PROMPTS))
        with raw_trainer(config) as trainer:
            sides = {f"train_{n}_threads": _training(trainer, rows, n) for n in (1, 2)}
            found |= await interleave(sides, effort)
    return found


def _engines(stage: Stage) -> dict[str, list[PlacedWorker]]:
    """The ways to lay raw engines over the machine: one with all cores, one a rollout actor, or one alone on one core.
    GPUs: one engine.
    """
    workers = stage.spawner.workers("rollout")
    cores = tuple(core for worker in workers for core in worker.cores)
    one = replace(workers[0], num_threads=sum(worker.num_threads for worker in workers), cores=cores)
    ways = {"generate_one_engine": [one]}
    if stage.prepared.config.resources.device == "cpu" and len(workers) > 1:
        ways["generate_engine_a_core"] = list(workers)
        ways["generate_one_core"] = workers[:1]
    return ways


@dataclass
class _Generating:
    """Raw generation of whole steps, their prompts shared out among the engines."""

    prepared: Prepared
    rounds: list[list[Prompt]]
    engines: Sequence[Peer[GenerateJob, Generated]] = ()
    responses: Sequence[Sequence[np.ndarray]] = ()  # to the last round's prompts

    async def run(self, round_number: int) -> float:
        seconds = [self._generate(self.rounds[round_number * CALLS + call]) for call in range(CALLS)]
        return CALLS * PROMPTS * SAMPLES / sum(seconds)

    def _generate(self, prompts: Sequence[Prompt]) -> float:
        raw = [RawPrompt.of(prompt) for prompt in prompts]
        settings = settings_of(self.prepared.config, prompts)
        share = -(-len(raw) // len(self.engines))
        for index, engine in enumerate(self.engines):
            part = slice(index * share, (index + 1) * share)
            engine.send(GenerateJob(raw[part], settings[part], is_processed=True))
        answers = [engine.receive() for engine in self.engines]
        self.responses = [siblings for answer in answers for siblings in answer.responses]
        return max(answer.seconds for answer in answers)


def _training(trainer: Peer[StepJob, float], rows: Rows, num_threads: int) -> Side:
    async def run(round_number: int) -> float:
        return PROMPTS * SAMPLES / trainer.ask(StepJob(rows, num_threads, TRAIN_STEPS))

    return run


def step_rates(steps: Sequence[StepRecord]) -> tuple[float, ...]:
    """steps/s over every few steps, so that what happens only in some of them is in every value."""
    blocks = [steps[start : start + STEPS_A_BLOCK] for start in range(0, len(steps), STEPS_A_BLOCK)]
    return tuple(len(block) / sum(step.seconds["total"] for step in block) for block in blocks)


def _findings(
    config: RunConfig, raw: Sequence[Mapping[str, tuple[float, ...]]], steps: Mapping[str, Sequence[StepRecord]]
) -> Findings:
    what = {
        "generate_one_engine": "LLM.generate, one engine with all cores; pictures processed beforehand",
        "generate_engine_a_core": "the same, with an engine on every core and the prompts shared out",
        "generate_one_core": "the same, with a single engine on one core",
        "train_1_threads": "forward, backward, clip and AdamW of all sequences in plain transformers, 1 thread",
        "train_2_threads": "the same with 2 threads",
    }
    series = {name: Series(what[name], UNIT, _joined(raw, name)) for name in raw[0]}
    serial: dict[str, float] = {}  # by loop
    limit: dict[str, float] = {}
    for place, (name, records) in enumerate(steps.items()):
        around = {part: median(_joined(raw[place : place + 2], part)) for part in raw[0]}
        fastest = (max(rate for part, rate in around.items() if part.startswith(p)) for p in ("generate", "train"))
        serial[name] = serial_rate(tuple(fastest))
        if "generate_one_core" in around:
            limit[name] = min(around["generate_one_core"], around["train_1_threads"])
        text = f"the loop, {LOOPS[name]}, {STEPS_A_BLOCK} steps a value"
        rates_per_s = tuple(PROMPTS * SAMPLES * rate for rate in step_rates(records))
        series[f"loop_{name}"] = Series(text, UNIT, rates_per_s)
    settings = {
        "prompts": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_tokens": config.sampler.max_tokens,
        "mean_response_tokens": mean(s.values[MetricName.RESPONSE_LENGTH] for run in steps.values() for s in run),
        "serial_samples_per_s": serial,
        "overlapped_limit": limit,
        "learner_ranks": config.resources.learner.num_workers,
        "rollout_actors": config.resources.rollout.num_workers,
        "seconds_of_a_step": {name: _mean_phases(records) for name, records in steps.items()},
    }
    ours = {name: series[f"loop_{name}"].median for name in steps}
    claims = [
        Claim("loop / serial sum of raw parts", ours["staleness_0"] / serial["staleness_0"], TARGET),
        Claim("loop with max_staleness=1 / serial sum", ours["staleness_1"] / serial["staleness_1"]),
    ]
    if "overlapped" in ours:
        share = ours["overlapped"] / limit["overlapped"]
        claims.append(Claim("overlapped loop / overlapped limit of raw parts", share, OVERLAPPED_TARGET))
        claims.append(Claim("overlapped loop / loop", ours["overlapped"] / ours["staleness_0"]))
        claims.append(Claim("overlapped loop / serial sum", ours["overlapped"] / serial["overlapped"]))
    return Findings(settings, series, tuple(claims))


def _joined(raw: Sequence[Mapping[str, tuple[float, ...]]], name: str) -> tuple[float, ...]:
    return tuple(value for parts in raw for value in parts[name])


def _mean_phases(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Phase -> mean seconds."""
    names = {phase for step in steps for phase in step.seconds}
    return {name: mean(step.seconds[name] for step in steps if name in step.seconds) for name in sorted(names)}
