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
from small_cluster import PROMPTS_PER_STEP, SmallRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MOMENTS = ("generating", "scoring", "in_broadcast", "in_update", "in_checkpoint")
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

    def plan_next(version: int) -> None:
        if version % STEPS_PER_FAULT == 1:
            for moment, sign in planned:
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
    for file in run.folder.glob("pid-*"):
        assert not is_running(int(file.read_text())), f"{file.name} is still there"


def is_running(process_id: int) -> bool:
    """Whether the process computes or could; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("victim", ["rollout/0", "learner/0", "learner/1", "reward/0"])
def test_a_role_that_is_killed_at_any_moment_costs_nothing_but_time(
    victim: str, tmp_path: Path, local_ray: str
) -> None:
    faults = [(moment, KILL) for moment in MOMENTS]
    run, _ = run_with(tmp_path, victim, faults)
    assert_nothing_lost_and_nothing_twice(run, victim, faults)
    assert run.losses.total() >= len(faults)
