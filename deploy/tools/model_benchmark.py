"""`mobula benchmark-model`: accuracy, throughput and utilisation of models on held-out prompts."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mobula.deploy.run import runtime  # isort: skip  (first: sets what ray reads)
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from mobula.cluster.errors import PreflightError, RewardError
from mobula.cluster.metrics.evaluation_statistics import interval_of_mean
from mobula.cluster.records.trajectory import Generated, Prompt, Reward, Trajectory
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.evaluation import mean_of_component
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.runtime.usage import UsageSampler
from mobula.cluster.workers.supervisor import background_tasks
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.build import Inference
from mobula.deploy.wiring.preparation import Prepared, require_model
from mobula.rewards.functions.parsing.extraction import extractor

ANSWER = extractor("fenced_json:answer")  # the claim of a record, as rules of grounding read it
T = TypeVar("T")

SAMPLE_PERIOD_S = 0.25
DIGITS = 3


@dataclass(frozen=True)
class Contestant:
    """One model and its number of prompts in flight."""

    config: RunConfig
    num_in_flight: int


@dataclass(frozen=True)
class TimedResponse:
    """One sampled response and its latency from submission to completion, queueing included."""

    prompt: Prompt
    trajectory: Trajectory
    latency_ms: float
    reward: Reward | None


@dataclass(frozen=True)
class ModelMeasurements:
    """Measurements of one model on all prompts."""

    answers: Sequence[TimedResponse]
    load_s: float
    generate_s: float
    usage: dict[str, Any]


def benchmark(models: Sequence[str], overrides: Sequence[str], folder: Path, console: Console) -> int:
    """Let each model, `FOLDER` or `FOLDER@PROMPTS_IN_FLIGHT`, answer the held-out split; returns the exit code.

    Leaves in `folder` one dated JSON of all models and, for each, the records that `mobula score` reads.

    Raises:
        ConfigError, PreflightError: a model or an override is unfit, or the folder cannot be written.
    """
    contestants = [_contestant(model, overrides) for model in models]
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC)
    name = f"models-{date:%Y-%m-%dT%H-%M-%SZ}"
    runs = [_run(contestant, folder / f"{name}-{i}.jsonl") for i, contestant in enumerate(contestants)]
    matrix = {"date": date.isoformat(timespec="seconds"), "runs": runs, "leaders": leaders(runs)}
    target = folder / f"{name}.json"
    target.write_text(json.dumps(matrix, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    console.print(_table(runs))
    console.print(f"written to {target}", markup=False, soft_wrap=True)
    return 0


def leaders(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The best model by accuracy (then by reward), by samples/s, and by how busy it kept the GPUs, or else the CPUs."""

    def best(key: Callable[[dict[str, Any]], Any]) -> str:
        return _name(max(runs, key=key), runs)

    return {
        "best_quality": best(lambda run: (run["quality"]["accuracy"], run["quality"]["average_reward"])),
        "best_throughput": best(lambda run: run["generation"]["samples_per_s"]),
        "best_utilization": best(lambda run: _utilization(run["usage"])),
    }


def _name(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> str:
    """The model, and its prompts in flight where it ran more than once."""
    is_alone = sum(other["model"] == run["model"] for other in runs) == 1
    return run["model"] if is_alone else f"{run['model']}@{run['generation']['prompts_in_flight']}"


def latency_summary(latencies_ms: Sequence[float]) -> dict[str, float]:
    """Average, percentiles by linear interpolation, and maximum."""
    summary = {
        "avg": np.mean(latencies_ms),
        "p50": np.percentile(latencies_ms, 50),
        "p95": np.percentile(latencies_ms, 95),
        "max": np.max(latencies_ms),
    }
    return {name: round(float(value), DIGITS) for name, value in summary.items()}


def _contestant(argument: str, overrides: Sequence[str]) -> Contestant:
    model, _, number = argument.rpartition("@") if "@" in argument else (argument, "", "")
    config = load_config([*overrides, f"policy.model={model}"])
    most = config.algorithm.max_concurrent_groups
    if number and not (number.isdecimal() and 0 < int(number) <= most):
        raise PreflightError(
            f"{argument}: {number!r} prompts in flight is no number from 1 to algorithm.max_concurrent_groups={most}: "
            "give another one, or raise that key"
        )
    require_model(config)
    return Contestant(config, int(number) if number else most)


def _run(contestant: Contestant, records: Path) -> dict[str, Any]:
    started = time.perf_counter()
    measured = runtime.with_engines(contestant.config, partial(_answer_all, contestant, started))
    with records.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record_of(answer)) + "\n" for answer in measured.answers)
    return _report(contestant, measured, records)


async def _answer_all(
    contestant: Contestant, started: float, prepared: Prepared, inference: Inference
) -> ModelMeasurements:
    """Samples all prompts, `num_in_flight` at a time, then scores the responses."""
    config = prepared.config
    held_out = await asyncio.to_thread(prepared.fixed_prompts, config.evaluation.split, config.evaluation.num_prompts)
    settings = SamplingSettings(1, config.evaluation.temperature, config.sampler.max_tokens, config.seed, 0)
    await inference.rollouts.generate(held_out.prompts[0], settings)  # what is compiled or filled once is not counted
    ready = time.perf_counter()
    semaphore = asyncio.Semaphore(contestant.num_in_flight)

    async def generate(prompt: Prompt) -> tuple[Generated, float]:
        async with semaphore:
            sent = time.perf_counter()
            generated = await inference.rollouts.generate(prompt, settings)
            return generated, 1000.0 * (time.perf_counter() - sent)

    with UsageSampler(os.getpid(), SAMPLE_PERIOD_S) as usage:
        generations = await _all(partial(generate, prompt) for prompt in held_out.prompts)
        generate_s = time.perf_counter() - ready
    rewards = await _all(
        partial(inference.rewards.score, generated.to_score, prompt.prompt_id)
        for prompt, (generated, _) in zip(held_out.prompts, generations, strict=True)
    )
    groups = await asyncio.to_thread(
        fetch, [generated.group for generated, _ in generations], timeout_s=config.timeouts.object_s, what="the answers"
    )
    answers = [
        TimedResponse(prompt, group.trajectories[0], latency_ms, reward[0])
        for prompt, group, (_, latency_ms), reward in zip(held_out.prompts, groups, generations, rewards, strict=True)
    ]
    return ModelMeasurements(answers, ready - started, generate_s, usage.summary())


async def _all(calls: Iterable[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """The results of calls side by side, in order."""
    async with background_tasks() as tasks:
        running = [tasks.create_task(call()) for call in calls]
        return [await task for task in running]


def record_of(answer: TimedResponse) -> dict[str, Any]:
    """The answer as `mobula score` reads it, the response as it was generated."""
    prompt, response = answer.prompt, answer.trajectory.response
    claim, _ = ANSWER(response.text)
    return {
        "id": prompt.sample_id,
        "prompt": prompt.text,
        "response": response.text,
        "reference": list(prompt.references),
        "metadata": {
            **prompt.metadata,
            "evidence_entities": list(prompt.references),
            "claimed_entities": [claim] if claim else [],
            "latency_ms": round(answer.latency_ms, DIGITS),
            "generated_tokens": response.num_tokens,
            "is_truncated": response.is_truncated,
        },
    }


def _report(contestant: Contestant, measured: ModelMeasurements, records: Path) -> dict[str, Any]:
    config, answers = contestant.config, measured.answers
    num_tokens = sum(answer.trajectory.response.num_tokens for answer in answers)
    return {
        "model": config.policy.model,
        "dataset": {
            "path": str(config.data.path),
            "split": config.evaluation.split,
            "num_prompts": len(answers),
        },
        "generation": {
            "sampler": config.sampler.kind,
            "device": config.resources.device,
            "num_engines": config.resources.rollout.num_workers,
            "prompts_in_flight": contestant.num_in_flight,
            "max_new_tokens": config.sampler.max_tokens,
            "load_s": round(measured.load_s, DIGITS),
            "generate_s": round(measured.generate_s, DIGITS),
            "samples_per_s": round(len(answers) / measured.generate_s, DIGITS),
            "generated_tokens_total": num_tokens,
            "generated_tokens_per_s": round(num_tokens / measured.generate_s, DIGITS),
            "sample_latency_ms": latency_summary([answer.latency_ms for answer in answers]),
        },
        "usage": measured.usage,
        "quality": _quality(config, answers),
        "records": records.name,
    }


def _quality(config: RunConfig, answers: Sequence[TimedResponse]) -> dict[str, Any]:
    """Scores with the run's rewards; averages over the scored answers.

    Raises:
        RewardError: there is none.
    """
    scored = [answer.reward for answer in answers if answer.reward is not None]
    if not scored:
        raise RewardError(f"none of {len(answers)} answers could be scored: check rewards.components")
    name = config.rewards.accuracy_component
    accuracy, num_scored = mean_of_component(name, scored)
    low, high = interval_of_mean([r.components[name] for r in scored if name in r.components], config.seed)
    average = sum(reward.value for reward in scored) / len(scored)
    quality = {"accuracy": accuracy, "low": low, "high": high, "average_reward": average}
    return {**{name: round(value, 6) for name, value in quality.items()}, "num_scored": num_scored}


def _utilization(usage: dict[str, Any]) -> float:
    of_gpus = [gpu["utilization_percent"]["avg"] for gpu in usage["gpus"] if gpu["utilization_percent"]]
    if of_gpus:
        return sum(of_gpus) / len(of_gpus)
    return usage["cpu_percent_of_one_core"]["avg"] if usage["cpu_percent_of_one_core"] else 0.0


def _table(runs: Sequence[dict[str, Any]]) -> Table:
    model = Column("model", overflow="fold")  # paths often differ at their ends alone
    table = Table(model, "accuracy", "reward", "samples/s", "tokens/s", "p50 ms", "p95 ms", "busy")
    for run in runs:
        quality, generation = run["quality"], run["generation"]
        latency = generation["sample_latency_ms"]
        table.add_row(
            _name(run, runs),
            f"{quality['accuracy']:.3f}",
            f"{quality['average_reward']:.3f}",
            f"{generation['samples_per_s']:.2f}",
            f"{generation['generated_tokens_per_s']:.1f}",
            f"{latency['p50']:.0f}",
            f"{latency['p95']:.0f}",
            f"{_utilization(run['usage']):.0f} %",
        )
    return table
