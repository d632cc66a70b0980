"""Audit: CPU time that the hash chain takes of a digits step, in the driver, the rollout actors and the learner.

One step as in `whole_step`, whose baseline gives the seconds of a step: 8 groups of 8 responses of 8 tokens, a push and
a line of metrics. The time of the driver's thread is counted; another thread syncs the file.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, interleave
from benchmarks.harness.report import BASELINES
from benchmarks.replay import Load, make_group
from mobula.cluster.audit.chain import ChainWriter
from mobula.cluster.audit.observer import RunAudit
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.records.trajectory import Reward, ScoredGroup, TrajectoryGroup, group_digest
from mobula.cluster.weight_sync.weight_sync import Push
from mobula.learner.batch import check_digest

LOAD = Load("digits", num_groups=8, num_tokens=8, num_trips=1)
NUM_STEPS = 200  # of one measurement
NUM_VALUES = 60  # of a line of metrics
MAX_SHARE = 0.02  # of a step
UNIT = "CPU ms/step"


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Both sides in turn; the overrides say nothing here."""
    group = make_group(LOAD)
    groups = [
        replace(group, prompt=replace(group.prompt, prompt_id=f"0/{n}/train-{n}")) for n in range(LOAD.num_groups)
    ]

    async def driver(round_number: int) -> float:
        return await _record_steps(groups)

    async def actors(round_number: int) -> float:
        start = time.thread_time()
        for _ in range(NUM_STEPS):
            for one in groups:
                group_digest(one)
        return 1000 * (time.thread_time() - start) / NUM_STEPS

    summaries = [one.summary() for one in groups]

    async def learner(round_number: int) -> float:
        start = time.thread_time()
        for _ in range(NUM_STEPS):
            for summary, one in zip(summaries, groups, strict=True):
                check_digest(summary, one)
        return 1000 * (time.thread_time() - start) / NUM_STEPS

    found = asyncio.run(interleave({"driver": driver, "actors": actors, "learner": learner}, effort))
    return _findings(found)


async def _record_steps(groups: Sequence[TrajectoryGroup]) -> float:
    """Returns the milliseconds of this thread for the records of a step."""
    rewards = tuple(Reward(1.0, {"accuracy": 1.0, "format": 0.0}) for _ in groups[0].trajectories)
    scored = [ScoredGroup(group.summary(), None, rewards) for group in groups]
    line = StepRecord(1, {"total": 0.2}, {f"value_{n}": 0.1 * n for n in range(NUM_VALUES)}, {0: 512}, {}, {})
    engines = {f"rollout/{n}": "checksum" for n in range(2)}
    with tempfile.TemporaryDirectory(prefix="mobula-") as folder:
        audit = RunAudit(ChainWriter(Path(folder)), Path(folder), Path(folder))
        start = time.thread_time()
        for version in range(1, NUM_STEPS + 1):
            for one in scored:
                audit.handed_out(one.summary.group_id)
            audit.trained(version, scored)
            await audit.pushed(Push(version, 1, 0.1, None, manifest_sha256="0" * 64, receivers=engines))
            audit.emit(line)
        return 1000 * (time.thread_time() - start) / NUM_STEPS


def _findings(found: dict[str, tuple[float, ...]]) -> Findings:
    whole = json.loads((BASELINES / "whole_step.json").read_text(encoding="utf-8"))
    step_ms = 1000 * whole["settings"]["seconds_of_a_step"]["staleness_0"]["total"]
    series = {
        "driver": Measurements("records of a step, a push and a line of metrics", UNIT, found["driver"]),
        "actors": Measurements("digests of the groups of a step, in the rollout actors", UNIT, found["actors"]),
        "learner": Measurements("digests of the groups of a step, in the learner", UNIT, found["learner"]),
    }
    whole_ms = sum(measured.median for measured in series.values())
    claims = (
        Claim("driver / synchronous digits step of whole_step", series["driver"].median / step_ms, MAX_SHARE, False),
        Claim("driver, actors and learner / the same step", whole_ms / step_ms, MAX_SHARE, at_least=False),
    )
    return Findings({"groups": LOAD.num_groups, "tokens": LOAD.num_tokens, "step_ms": step_ms}, series, claims)
