"""Reward pool: samples/s of cheap rules through Ray, and the latency that the way there and back adds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness.stage import private_ray, scratch_config, staged  # isort: skip  (sets what ray reads when imported)
import ray

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, interleave
from benchmarks.replay import NUM_SIBLINGS, Load, make_group
from mobula.cluster.records.trajectory import Generated, Response, TrajectoryGroup
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.roles import reward_pool
from mobula.rewards.components import RewardScoring
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.pool.reward_pool import RewardPool
from mobula.rewards.pool.worker import reward_request
from mobula.rewards.tools import Tools

ROLES = ("reward",)
SETTINGS = (
    "resources.reward.num_workers=2",
    "resources.reward.num_cpus=0.5",
    "rewards.pool.max_batch_groups=32",
    "rewards.pool.max_queued_groups=4096",
)
NUM_TOKENS = 8  # of each response
SHAPE = Load("answers", num_groups=1, num_tokens=NUM_TOKENS, num_trips=1)
NUM_GROUPS = 2500  # of one measurement: 20,000 samples
IN_FLIGHT = 256  # groups, where throughput is measured
OFFERED_PER_S = 10_000  # samples, where latency is measured
MAX_ADDED_S = 0.010
ANSWERS = (
    r"It is \boxed{%d}",
    r"\boxed{%d} or so",
    "%d",
    r"So \boxed{\frac{%d}{1}}",
    "<think>a</think><answer>%d</answer>",
)
COMPONENTS = """rewards.components=[
  {name: accuracy, function: exact_match, weight: 1.0, options: {ignore_case: true, whole_response: false}, REST},
  {name: boxed, function: format, weight: 0.1, options: {preset: boxed}, REST},
  {name: tags, function: format, weight: 0.1, options: {preset: think_answer}, REST}]"""
REST = "service: reward, needs_images: false, retries: 0, cache_entries: 0"


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """A pool as a run starts it. Responses come by value, as rollout actors tell of them where they are few bytes;
    beside it the latency of groups that workers have to fetch.
    """
    components = " ".join(COMPONENTS.replace("REST", REST).split())
    with scratch_config((*SETTINGS, components), overrides) as config, private_ray(config):
        return asyncio.run(_measure(effort, config))


async def _measure(effort: Effort, config: RunConfig) -> Findings:
    async with staged(config, ROLES) as stage:
        groups = [numbered_group(index) for index in range(NUM_GROUPS)]
        fetched = [ray.put(group) for group in groups]
        answered = [_generated(group, reference).to_score for group, reference in zip(groups, fetched, strict=True)]
        pool = reward_pool(config, stage.spawner)
        try:
            found = await interleave(
                {
                    "pool": partial(_throughput, pool, answered),
                    "in process": partial(_in_process, config, groups),
                    "latency": partial(_latency, pool, answered),
                    "fetched": partial(_latency, pool, fetched),
                },
                effort,
            )
        finally:
            await pool.close()
    return _findings(config, found)


def _findings(config: RunConfig, found: dict[str, tuple[float, ...]]) -> Findings:
    alone_s = NUM_SIBLINGS / median(found["in process"])
    added = median(found["latency"]) - alone_s
    through_ray = f"samples of three cheap rules through Ray, {IN_FLIGHT} groups in flight"
    return Findings(
        settings={"groups": NUM_GROUPS, "siblings": NUM_SIBLINGS, "components": len(config.rewards.components)},
        series={
            "pool": Measurements(through_ray, "samples/s", found["pool"]),
            "in process": Measurements("the same rules in this process", "samples/s", found["in process"]),
            "latency": Measurements(f"median latency of a group at {OFFERED_PER_S} samples/s", "s", found["latency"]),
            "fetched": Measurements("the same of groups that are fetched from the object store", "s", found["fetched"]),
        },
        claims=(
            Claim(f"throughput / {OFFERED_PER_S} samples/s", median(found["pool"]) / OFFERED_PER_S, 1.0),
            Claim("latency added by the pool (p50) / 10 ms", added / MAX_ADDED_S, 1.0, at_least=False),
            Claim("pool / in process", median(found["pool"]) / median(found["in process"])),
        ),
    )


async def _throughput(pool: RewardPool, groups: Sequence[Any], _: int) -> float:
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def score(group: Any) -> None:
        async with gate:
            await pool.score(group, "a group")

    started = time.perf_counter()
    await asyncio.gather(*(score(group) for group in groups))
    return len(groups) * NUM_SIBLINGS / (time.perf_counter() - started)


async def _latency(pool: RewardPool, groups: Sequence[Any], _: int) -> float:
    """Groups come at their times whatever is in flight; the median over them of how long each took."""
    latencies: list[float] = []

    async def score(group: Any, due: float) -> None:
        await pool.score(group, "a group")
        latencies.append(time.perf_counter() - due)

    started, tasks = time.perf_counter(), []
    for index, group in enumerate(groups):
        due = started + index * NUM_SIBLINGS / OFFERED_PER_S
        if due > time.perf_counter():
            await asyncio.sleep(due - time.perf_counter())
        tasks.append(asyncio.create_task(score(group, due)))
    await asyncio.gather(*tasks)
    return median(latencies)


async def _in_process(config: RunConfig, groups: Sequence[TrajectoryGroup], _: int) -> float:
    isolated = IsolatedProcess(timeout_s=config.timeouts.reward_s, start_timeout_s=config.timeouts.start_s)
    scoring = RewardScoring(config.rewards, None, Tools(isolated, config.resources.device, config.resources.dtype))
    started = time.perf_counter()
    for group in groups:
        scoring.rewards([reward_request(group.prompt, row.response, ()) for row in group.trajectories])
    rate = len(groups) * NUM_SIBLINGS / (time.perf_counter() - started)
    isolated.close()
    return rate


def _generated(group: TrajectoryGroup, reference: Any) -> Generated:
    """The group as a rollout actor's client receives it."""
    return Generated.of(group.prompt, reference, (group.summary(), group.small_responses()))


def numbered_group(index: int) -> TrajectoryGroup:
    """Eight short answers of different shapes, some of them right."""
    group = make_group(SHAPE)
    texts = [ANSWERS[(index + i) % len(ANSWERS)] % (index + i % 2) for i in range(len(group.trajectories))]
    return TrajectoryGroup(
        replace(group.prompt, prompt_id=f"0/{index}", sample_id=str(index), references=(str(index),)),
        tuple(
            replace(trajectory, trajectory_id=f"0/{index}#{i}", response=Response(text, NUM_TOKENS, is_truncated=False))
            for i, (trajectory, text) in enumerate(zip(group.trajectories, texts, strict=True))
        ),
    )
