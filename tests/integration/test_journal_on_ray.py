"""The journal's writer on real references: a group that is not there yet is no matter of those beside it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from fakes import make_group, make_prompt, make_scored
from small_cluster import start

from mobula.cluster.records.trajectory import TrajectoryGroup
from mobula.cluster.replay.journal import Journal
from mobula.cluster.replay.journal_writer import JournalWriter
from mobula.cluster.runtime.ray_actors import kill

pytestmark = pytest.mark.timeout(240)

MANY_TOKENS = 2**16  # too many for a message: the group is in the object store


class Slow:
    """Gives a group back as soon as there is a file `once`."""

    def give(self, group: TrajectoryGroup, once: Path) -> TrajectoryGroup:
        while not once.exists():
            time.sleep(0.01)
        return group


async def test_a_group_that_is_late_holds_up_nothing_and_is_written_once_it_is_there(
    local_ray: str, tmp_path: Path
) -> None:
    slow, once = start(Slow, "slow", options={}), tmp_path / "once"
    small, late, plain = (make_scored(f"0/{n}/s") for n in range(3))
    large = make_group(make_prompt("1/0/s"), versions=np.zeros(MANY_TOKENS, dtype=int).tolist())
    groups = {
        "small": replace(small, group=ray.put(small.group)),
        "late": replace(late, group=slow.give.remote(late.group, once)),
        "large": replace(small, summary=large.summary(), group=ray.put(large)),
        "plain": plain,
    }
    folder = tmp_path / "journal"
    writer = JournalWriter(Journal(folder, {}), timeout_s=120)
    try:
        calls = {name: asyncio.ensure_future(writer.finished(group)) for name, group in groups.items()}
        await asyncio.gather(calls["small"], calls["large"], calls["plain"])
        assert not calls["late"].done()
        assert written(folder) == ["0/0/s", "0/2/s", "1/0/s"]
        once.touch()
        await calls["late"]
        assert written(folder) == ["0/0/s", "0/1/s", "0/2/s", "1/0/s"]
        assert (await writer.read(["1/0/s"]))["1/0/s"].group.trajectories[0].num_steps == MANY_TOKENS
    finally:
        kill(slow)
    await writer.close()


def written(folder: Path) -> list[str]:
    return sorted(group.group_id for group in Journal(folder, {}).recover(0).finished)
