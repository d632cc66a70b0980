"""Limits: which role to scale, and what breaks first at which size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mobula.cluster.records.trajectory import Prompt, Reward, ScoredGroup
from mobula.deploy.rehearsal.simulated.engine import summary_of
from mobula.deploy.rehearsal.stage import FASTER, FEW_STEPS, RehearsalStage, Result, result_of
from mobula.learner.shares import StepGroups
from mobula.learner.shares.share_fetcher import planned_shares

SPEED_UP = 2.0
MAX_DRIVER_SHARE = 1.0
MAX_PLANNING_SHARE = 0.1  # of a step, in which every rank computes which groups to fetch
MIN_EFFICIENCY = 0.8  # tokens/s a worker, over those of the smallest size


@dataclass(frozen=True)
class Gain:
    """The effect of a role with twice the speed."""

    role: str
    step_s: float
    gain: float  # steps per hour, over those of the configuration


@dataclass(frozen=True)
class Size:
    """A rehearsal with `factor` times the nodes, workers and prompts."""

    factor: int
    num_steps: int  # that were played
    num_engines: int
    num_ranks: int
    result: Result
    planning_s: float  # CPU seconds of each rank for the shares of one step, measured
    wall_s: float
    broken: tuple[str, ...]  # limits that it exceeds


def gains(stage: RehearsalStage, base: Result) -> list[Gain]:
    """Plays the run with each role at twice its speed, the largest gain first."""
    roles = [role for role in FASTER if role == "network" or base.utilisation.get(role, 0.0) > 0.01]
    found = []
    for role in roles:
        faster = stage.faster(role, SPEED_UP)
        result = result_of(faster, faster.play(num_steps=stage.config.num_steps))
        found.append(Gain(role, result.step_s, base.step_s / result.step_s - 1))
    return sorted(found, key=lambda gain: -gain.gain)


@dataclass(frozen=True)
class Sweep:
    """The sizes that were played."""

    sizes: tuple[Size, ...] = ()
    ended: str = ""  # why larger sizes were not played


def swept(stage: RehearsalStage, factors: Sequence[int], max_wall_s: float) -> Sweep:
    """Plays the run at each size, the smallest first, each for at most `max_wall_s` on this machine. A size without a
    finished step ends the sweep.
    """
    found: list[Size] = []
    for factor in sorted(factors):
        started = time.perf_counter()
        larger = stage.larger(factor)
        played = larger.play(num_steps=FEW_STEPS, max_wall_s=max_wall_s)
        if not played.steps:
            reason = played.error or "no step"
            return Sweep(tuple(found), f"x{factor} and larger sizes are unknown: {reason}; raise --size-seconds")
        result = result_of(larger, played)
        planning_s = planning_seconds(larger)
        resources = larger.config.resources
        size = Size(
            factor=factor,
            num_steps=len(played.steps),
            num_engines=resources.rollout.num_workers,
            num_ranks=resources.learner.num_workers,
            result=result,
            planning_s=planning_s,
            wall_s=time.perf_counter() - started,
            broken=_broken(result, planning_s, factor, found[0] if found else None),
        )
        found.append(size)
    return Sweep(tuple(found))


def planning_seconds(stage: RehearsalStage) -> float:
    """CPU seconds in which one learner rank computes the shares of all ranks, twice as in each step."""
    config = stage.config
    source = stage.prepared.source()
    prompts = [source.next() for _ in range(min(32, config.algorithm.prompts_per_step))]
    groups = [_group(stage, prompts[n % len(prompts)], n) for n in range(config.algorithm.prompts_per_step)]
    started = time.thread_time()
    entries = StepGroups(groups, 1, config)
    expected = entries.expected()
    for _ in range(2):
        planned_shares(entries, expected, config.resources.learner.num_workers)
    return time.thread_time() - started


def _group(stage: RehearsalStage, prompt: Prompt, number: int) -> ScoredGroup:
    num_siblings = stage.config.algorithm.samples_per_prompt
    lengths = stage.lengths.of(f"planning/{number}", num_siblings).tolist()
    summary = summary_of(prompt, {0: sum(lengths)}, lengths, stage.config.sampler.max_tokens)
    return ScoredGroup(summary, None, (Reward(0.0),) * num_siblings)


def _broken(result: Result, planning_s: float, factor: int, smallest: Size | None) -> tuple[str, ...]:
    broken = []
    if result.driver.share > MAX_DRIVER_SHARE:
        broken.append(f"driver: {result.driver.measured_s + result.driver.ray_s:.1f} CPU s a step")
    if result.store_share > 1:
        broken.append(f"object store of {result.store_node}: {result.store_share:.1f} times its capacity")
    if planning_s > MAX_PLANNING_SHARE * result.step_s:
        broken.append(f"learner: {planning_s:.1f} s a step for the shares of ranks")
    if smallest is not None:
        each = result.tokens_per_s / factor, smallest.result.tokens_per_s / smallest.factor
        if each[0] < MIN_EFFICIENCY * each[1]:
            broken.append(f"efficiency: {each[0] / each[1]:.0%} of the smallest size")
    return tuple(broken)
