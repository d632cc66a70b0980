"""The buffer's order, leases and counts."""

import asyncio

import pytest
from fakes import make_scored

from cluster.replay_buffer import DUPLICATE, ReplayBuffer
from cluster.trajectory import ScoredGroup


def ids(groups: list[ScoredGroup]) -> list[str]:
    return [group.summary.group_id for group in groups]


async def filled(*group_ids: str) -> ReplayBuffer:
    replay = ReplayBuffer()
    for group_id in group_ids:
        await replay.put(make_scored(group_id))
    return replay


async def test_groups_are_taken_in_the_order_of_arrival() -> None:
    replay = await filled("c", "a", "b")
    assert ids(await replay.take(2)) == ["c", "a"]
    assert ids(await replay.take(1)) == ["b"]


async def test_take_waits_until_enough_groups_are_ready() -> None:
    replay = await filled("a")
    taking = asyncio.create_task(replay.take(2))
    await asyncio.sleep(0.01)
    assert not taking.done()
    await replay.put(make_scored("b"))
    assert ids(await asyncio.wait_for(taking, 1)) == ["a", "b"]


async def test_a_cancelled_take_leases_nothing() -> None:
    replay = await filled("a")
    taking = asyncio.create_task(replay.take(2))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    stats = await replay.stats()
    assert (stats.num_ready, stats.num_taken) == (1, 0)


@pytest.mark.parametrize("when", ["ready", "taken", "released", "rejected"])
async def test_a_group_that_is_delivered_twice_is_trained_on_once(when: str) -> None:
    replay = ReplayBuffer()
    if when == "rejected":
        await replay.reject("a", "uniform")
    else:
        await replay.put(make_scored("a"))
    groups = await replay.take(1) if when in ("taken", "released") else []
    if when == "released":
        await replay.release(groups)
    await replay.put(make_scored("a"))
    stats = await replay.stats()
    assert stats.num_ready == (1 if when == "ready" else 0)
    assert stats.num_rejected[DUPLICATE] == 1


async def test_aborted_groups_are_the_first_to_be_taken_again() -> None:
    replay = await filled("a", "b", "c", "d")
    await replay.abort(await replay.take(2))
    assert ids(await replay.take(4)) == ["a", "b", "c", "d"]


async def test_released_groups_are_forgotten() -> None:
    replay = await filled("a", "b")
    groups = await replay.take(2)
    await replay.release(groups)
    stats = await replay.stats()
    assert (stats.num_ready, stats.num_taken, stats.num_bytes) == (0, 0, 0)
    with pytest.raises(ValueError, match="group a has no lease"):
        await replay.release(groups)


async def test_stats_count_what_is_held_and_why_groups_were_rejected() -> None:
    now = 100.0
    replay = ReplayBuffer(clock=lambda: now)
    group = make_scored("a")
    await replay.put(group)
    now = 103.0
    await replay.put(make_scored("b"))
    await replay.take(1)
    await replay.reject("x", "uniform")
    await replay.reject("y", "uniform")
    stats = await replay.stats()
    assert (stats.num_ready, stats.num_taken, stats.oldest_age_s) == (1, 1, 3.0)
    assert stats.oldest_id == "a"
    assert stats.num_bytes == 2 * group.summary.num_bytes
    assert stats.num_rejected == {"uniform": 2}
