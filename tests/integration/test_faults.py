"""The fault matrix: whoever dies, hangs or is slow, at whichever moment, the run trains what it would have trained.

Each run takes several faults, one after the other, each at an exact moment (`sabotage`). Its final state holds the ids
of all groups in the order in which they were trained; at staleness 0 it must be the state of the run without faults.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import wait_until
from sabotage import is_running
from small_cluster import PROMPTS_PER_STEP, SmallRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MOMENTS = ("generating", "scoring", "in_broadcast", "in_update", "in_checkpoint")
GONE_S = 30.0
BACK_S = 90.0
KILL, HANG, SLOW = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
STEPS_PER_FAULT = 4  # one checkpoint interval and one more, so that every moment comes


def expected(num_steps: int) -> list[list[str]]:
    """The steps of a run in which nothing ever failed, at staleness 0."""
    ids = [f"0/{n}/s{n}" for n in range(num_steps * PROMPTS_PER_STEP)]
    return [ids[i : i + PROMPTS_PER_STEP] for i in range(0, len(ids), PROMPTS_PER_STEP)]


def run_with(
    folder: Path, victim: str, faults: Sequence[tuple[str, signal.Signals]], **settings: object
) -> tuple[SmallRun, float]:
    """A run to which the faults happen one after the other; and its seconds."""
    planned = iter(faults)

    async def plan_next(version: int) -> None:
        """The next fault waits for the victim of the last one to be back: the others go on without it meanwhile."""
        if version % STEPS_PER_FAULT == 1:
            for moment, sign in planned:
                async with asyncio.timeout(BACK_S):
                    while not run.saboteur.is_there(victim) or not run.is_whole:
                        await asyncio.sleep(0.05)
                run.saboteur.plan(moment, victim=victim, signal=sign)
                break

    run = SmallRun(folder, total_steps=STEPS_PER_FAULT * len(faults) + 2, on_version=plan_next, **settings)
    started = time.monotonic()
    assert asyncio.run(run.go()) == STEPS_PER_FAULT * len(faults) + 2
    return run, time.monotonic() - started


def assert_nothing_lost_and_nothing_twice(run: SmallRun, victim: str, faults: Sequence[tuple[str, signal.Signals]]) -> None:
    assert run.saboteur.struck == [f"{moment} {victim} {int(sign)}" for moment, sign in faults]
    trained = [sorted(step) for step in run.trained]
    assert trained == [sorted(step) for step in expected(len(trained))]
    wait_until(lambda: not left(run.folder), GONE_S, lambda: left(run.folder))


def left(folder: Path) -> list[str]:
    """Roles of the run whose process is still there: Ray ends them a moment after it was told to."""
    return [file.name for file in folder.glob("pid-*") if is_running(int(file.read_text()))]


@pytest.mark.parametrize("victim", ["rollout/0", "learner/1", "reward/0"])
def test_a_role_that_is_killed_at_any_moment_costs_nothing_but_time(
    victim: str, tmp_path: Path, local_ray: str
) -> None:
    faults = [(moment, KILL) for moment in MOMENTS]
    run, _ = run_with(tmp_path, victim, faults)
    assert_nothing_lost_and_nothing_twice(run, victim, faults)
    assert run.losses.total() >= len(faults)


@pytest.mark.parametrize("victim", ["rollout/1", "learner/1"])
def test_a_role_that_hangs_or_is_slow_is_told_apart_from_a_busy_one(
    victim: str, tmp_path: Path, local_ray: str
) -> None:
    """Stopped for ever it is replaced; stopped for less than its deadlines it is waited for."""
    faults = [("generating", SLOW), ("in_broadcast", HANG), ("in_update", HANG)]
    run, _ = run_with(tmp_path, victim, faults)
    assert_nothing_lost_and_nothing_twice(run, victim, faults)
    assert run.losses
