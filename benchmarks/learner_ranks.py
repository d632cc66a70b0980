"""Learner ranks: CPU time of a step for the driver and for each rank, per rank, with 256 to 4,096 simulated ranks.

The driver: `LearnerGroup.update` on ranks that answer at once, with Ray replaced; it plans the shares and sends each
rank the references of its share. References: the number that a rank receives. A rank: the shares of all ranks, which
every rank computes for each step. A step has two groups of four responses a rank.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, Side, interleave
from mobula.cluster.records.trajectory import GroupSummary, Reward, ScoredGroup
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.rehearsal.roles import Handle, SimulatedRank, SimulatedRanks
from mobula.deploy.rehearsal.simulated.machine import Cores
from mobula.deploy.rehearsal.speeds import Speeds
from mobula.learner.examples import Planners
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.shares import StepGroups, planned_shares, planner_of

NUM_RANKS = (256, 1024, 4096)
GROUPS_OF_RANK, SIBLINGS = 2, 4
PROMPT_TOKENS, MEDIAN_TOKENS, SIGMA = 1024, 400, 0.8
MAX_REPEATS = 3
LINEAR = 1.5
UNIT, COUNT = "CPU ms/rank", "references/rank"
NO_TIME = {"decode_step_s": 0.0, "decode_sequence_s": 0.0, "start_s": 0.0}
AT_ONCE = Speeds(**NO_TIME, prefill_tokens_per_s=float("inf"), learner_tokens_per_s=float("inf"))


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Every number of ranks in turn."""
    effort = replace(effort, repeats=min(effort.repeats, MAX_REPEATS), warmups=1)
    tune_gc()  # as driver and ranks do
    configs = {
        "padded": load_config(["experiment=digits", *overrides]),
        "packed": load_config(["experiment=digits", "learner.packing=true", *overrides]),
    }
    sides: dict[str, Side] = {f"driver_{num}": _driver(configs["padded"], num) for num in NUM_RANKS}
    sides |= {f"references_{num}": _references(configs["padded"], num) for num in NUM_RANKS}
    for name, config in configs.items():
        sides |= {f"{name}_{num}": _shares(config, num) for num in NUM_RANKS}
    found = asyncio.run(interleave(sides, effort))
    what = {
        "driver": "LearnerGroup.update",
        "references": "references in a call",
        **{name: f"shares of a step, {name} rows" for name in configs},
    }
    units = {"references": COUNT}
    series = {
        f"{name}_{num}": Measurements(f"{text}; {num} ranks", units.get(name, UNIT), found[f"{name}_{num}"])
        for name, text in what.items()
        for num in NUM_RANKS
    }
    claims = [
        Claim(
            f"{text}: {'number' if name in units else 'time'} a rank, {NUM_RANKS[-1]} ranks / {NUM_RANKS[0]}",
            series[f"{name}_{NUM_RANKS[-1]}"].median / series[f"{name}_{NUM_RANKS[0]}"].median,
            LINEAR,
            at_least=False,
        )
        for name, text in what.items()
    ]
    settings = {"groups_of_a_rank": GROUPS_OF_RANK, "siblings": SIBLINGS, "prompt_tokens": PROMPT_TOKENS}
    return Findings(settings, series, tuple(claims))


def _driver(config: RunConfig, num_ranks: int) -> Side:
    groups = _groups(num_ranks * GROUPS_OF_RANK)

    async def run(round_number: int) -> float:
        learner, _ = _learner(config, num_ranks)
        started = time.thread_time()
        await learner.update(groups)
        return 1000 * (time.thread_time() - started) / num_ranks

    return run


def _references(config: RunConfig, num_ranks: int) -> Side:
    groups = _groups(num_ranks * GROUPS_OF_RANK)

    async def run(round_number: int) -> float:
        learner, ranks = _learner(config, num_ranks)
        await learner.update(groups)
        return ranks.borrowed / num_ranks

    return run


def _learner(config: RunConfig, num_ranks: int) -> tuple[LearnerGroup, SimulatedRanks]:
    ranks = SimulatedRanks(AT_ONCE, num_ranks, Manifest(()), Cores())
    handles = [Handle(SimulatedRank(ranks, index), f"learner/{index}") for index in range(num_ranks)]
    group = LearnerGroup(lambda: handles, config.timeouts, lambda value: value, planners=Planners(planner_of(config)))
    return group, ranks


def _shares(config: RunConfig, num_ranks: int) -> Side:
    groups = _groups(num_ranks * GROUPS_OF_RANK)

    async def run(round_number: int) -> float:
        entries = StepGroups(groups, 1, config)
        started = time.thread_time()
        planned_shares(entries, num_ranks)
        return 1000 * (time.thread_time() - started) / num_ranks

    return run


def _groups(num: int) -> list[ScoredGroup]:
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, MEDIAN_TOKENS * np.exp(SIGMA * rng.standard_normal((num, SIBLINGS)))).astype(int)
    return [
        ScoredGroup(
            GroupSummary(
                group_id=str(index),
                sample_id=str(index),
                num_trajectories=SIBLINGS,
                num_steps=tuple(row),
                num_prompt_tokens=PROMPT_TOKENS,
                num_media_tokens=0,
                num_tokens=sum(row),
                num_truncated=0,
                tokens_by_version={0: sum(row)},
                media_keys=(),
                num_media_bytes=0,
                num_bytes=0,
            ),
            "reference",
            (Reward(0.0),) * SIBLINGS,
        )
        for index, row in enumerate(lengths.tolist())
    ]
