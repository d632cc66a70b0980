"""Trajectory replay: repeats the recorded training steps of a run without rollout actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.replay.live_groups import LiveGroups
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.cluster.roles import Learner, UpdateReport


def recorded_steps(log: TrajectoryLog) -> range:
    """Returns the steps of a log, from the first.

    Raises:
        PreflightError: the log is empty or a step is missing.
    """
    steps = log.steps()
    if not steps:
        raise PreflightError(f"{log.folder} holds no recorded step: run with replay.trajectory_log=true first")
    missing = sorted(set(range(1, steps[-1] + 1)) - set(steps))
    if missing:
        raise PreflightError(
            f"{log.folder} lacks step {missing[0]} ({len(missing)} of {steps[-1]} are missing): a run is replayed from "
            "its first step on, so it must have been recorded from the first step on"
        )
    return range(1, steps[-1] + 1)


async def train_again(
    learner: Learner, log: TrajectoryLog, groups: LiveGroups, on_step: Callable[[UpdateReport], None]
) -> int:
    """Trains every recorded step, starting from version 0 of the learner. Returns the final version.

    With the run's own configuration this reproduces the weights (see `mobula.cluster.recovery.resume`).

    Raises:
        PreflightError: the log has a gap.
        SkippedSample: the data no longer contain a recorded prompt.
    """

    def revived(step: int) -> list[ScoredGroup]:
        return [groups.revive(recorded) for recorded in log.read(step)]

    steps = recorded_steps(log)
    for step in steps:
        live = await asyncio.to_thread(revived, step)
        report = await learner.update(live)
        assert report.version == step, f"recorded step {step} made version {report.version}"
        on_step(report)
    return steps[-1]
