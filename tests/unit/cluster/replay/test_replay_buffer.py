"""The buffer's order, leases and counts."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fakes import make_scored
from hypothesis import given, settings
from hypothesis import strategies as st

from mobula.cluster.errors import DeadlineError, JournalError, LostObjectError
from mobula.cluster.records.trajectory import GroupOutcome, ScoredGroup
from mobula.cluster.replay.buffer import DUPLICATE, ReplayBuffer
from mobula.cluster.replay.journal import Journal
from mobula.cluster.replay.journal_writer import GroupJournal, JournalWriter


def ids(groups: list[ScoredGroup]) -> list[str]:
    return [group.summary.group_id for group in groups]


async def filled(*group_ids: str) -> ReplayBuffer:
    replay = ReplayBuffer()
    for group_id in group_ids:
        await replay.put([make_scored(group_id)])
    return replay


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
        await replay.reject(GroupOutcome("a"), "uniform")
    else:
        await replay.put([make_scored("a")])
    groups = await replay.take(1) if when in ("taken", "released") else []
    if when == "released":
        await replay.release(groups)
    await replay.put([make_scored("a")])
    stats = await replay.stats()
    assert stats.num_ready == (1 if when == "ready" else 0)
    assert stats.num_rejected[DUPLICATE] == 1


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
    await replay.put([group])
    now = 103.0
    await replay.put([make_scored("b")])
    await replay.take(1)
    await replay.reject(GroupOutcome("x"), "uniform")
    await replay.reject(GroupOutcome("y"), "uniform")
    stats = await replay.stats()
    assert (stats.num_ready, stats.num_taken, stats.oldest_age_s) == (1, 1, 3.0)
    assert stats.oldest_id == "a"
    assert stats.num_bytes == 2 * group.summary.num_bytes
    assert stats.num_rejected == {"uniform": 2}


def group_bytes() -> int:
    return make_scored("a").summary.num_bytes


async def blocked(call: asyncio.Task[None]) -> bool:
    for _ in range(20):
        await asyncio.sleep(0)
    return not call.done()


async def test_a_reserved_group_is_held_but_not_ready_until_it_is_put() -> None:
    replay = ReplayBuffer()
    first, second = make_scored("a"), make_scored("b")
    await replay.reserve(first)
    await replay.reserve(second)
    assert (await replay.stats()).num_ready == 0
    assert (await replay.stats()).num_bytes == 2 * group_bytes()
    await replay.put([second])
    await replay.put([first])
    assert ids(await replay.take(2)) == ["b", "a"]
    assert (await replay.stats()).num_rejected == {}


async def test_beyond_the_budget_groups_wait_until_a_step_was_released() -> None:
    replay = ReplayBuffer(max_bytes=2 * group_bytes(), min_ready=2)
    await replay.put([make_scored("a")])
    await replay.put([make_scored("b")])
    third = asyncio.create_task(replay.reserve(make_scored("c")))
    assert await blocked(third)
    assert (await replay.stats()).num_waiting == 1
    taken = await replay.take(2)
    await asyncio.wait_for(third, 5)
    await replay.put([make_scored("d")])
    await replay.put([make_scored("c")])
    fifth = asyncio.create_task(replay.put([make_scored("e")]))
    assert await blocked(fifth), "c and d are ready, a and b are leased"
    await replay.release(taken)
    assert await blocked(fifth), "c and d alone fill the budget"
    await replay.release(await replay.take(2))
    await asyncio.wait_for(fifth, 5)


async def test_the_budget_never_keeps_a_step_from_becoming_ready() -> None:
    replay = ReplayBuffer(max_bytes=1, min_ready=4)
    for name in "wxyz":
        await replay.reserve(make_scored(f"{name}/reserved"))
    for name in "abcd":
        await asyncio.wait_for(replay.put([make_scored(name)]), 5)
    assert ids(await asyncio.wait_for(replay.take(4), 5)) == list("abcd")


async def test_a_group_larger_than_the_budget_is_let_in_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    replay = ReplayBuffer(max_bytes=group_bytes() - 1)
    await replay.put([make_scored("a")])
    assert (await replay.stats()).num_oversized == 1
    assert ids(await replay.take(1)) == ["a"]
    assert f"group a has {group_bytes()} bytes" in caplog.text
    assert "replay.max_bytes" in caplog.text


async def test_a_group_that_waited_in_vain_may_come_again(caplog: pytest.LogCaptureFixture) -> None:
    replay = ReplayBuffer(max_bytes=group_bytes(), min_ready=1, room_s=0.02)
    await replay.put([make_scored("a")])
    waiting = asyncio.create_task(replay.reserve(make_scored("b")))
    assert await blocked(waiting)
    await replay.reserve(make_scored("b"))
    assert (await replay.stats()).num_rejected == {DUPLICATE: 1}, "it waits already"
    with pytest.raises(DeadlineError, match=r"waited 0\.02 s .* room for group b \(timeouts\.backpressure_s\)"):
        await waiting
    await replay.release(await replay.take(1))
    await replay.put([make_scored("b")])
    assert ids(await replay.take(1)) == ["b"]


async def test_a_take_waits_for_rollouts_until_its_deadline() -> None:
    replay = ReplayBuffer(take_s=0.02)
    await replay.put([make_scored("a")])
    message = r"waited 0\.02 s for the replay buffer to hold 2 finished groups, it has 1"
    with pytest.raises(DeadlineError, match=message):
        await replay.take(2)
    assert ids(await replay.take(1)) == ["a"]


@given(seed=st.integers(0, 10**6), num_groups=st.integers(1, 40), budget=st.integers(0, 8), size=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_in_any_order_of_events_each_group_is_trained_once(seed: int, num_groups: int, budget: int, size: int) -> None:
    """Producers are cancelled and deliver again, steps are aborted and taken again."""
    rng = random.Random(seed)
    num_groups += -num_groups % size

    async def pause() -> None:
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)

    async def run() -> None:
        replay = ReplayBuffer(max_bytes=budget * group_bytes(), min_ready=size)
        trained: list[str] = []

        async def produce() -> None:
            for n in range(num_groups):
                while True:
                    putting = asyncio.create_task(replay.put([make_scored(str(n))]))
                    await pause()
                    if rng.random() < 0.3:
                        putting.cancel()
                    await asyncio.wait({putting})
                    if not putting.cancelled():
                        break
                    await pause()

        async def train() -> None:
            while len(trained) < num_groups:
                groups = await replay.take(size)
                await pause()
                if rng.random() < 0.3:
                    await replay.abort(groups)
                else:
                    trained.extend(ids(groups))
                    await replay.release(groups)
                stats = await replay.stats()
                assert stats.num_bytes <= max(budget, 2 * size) * group_bytes(), "a step is ready, another is trained"

        async with asyncio.timeout(20):
            await asyncio.gather(produce(), train())
        assert trained == [str(n) for n in range(num_groups)]
        stats = await replay.stats()
        assert (stats.num_ready, stats.num_taken, stats.num_bytes, stats.num_waiting) == (0, 0, 0, 0)

    asyncio.run(run())


async def test_a_step_and_its_groups_are_on_disk_once_it_is_committed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    replay = ReplayBuffer(journal=JournalWriter(journal, timeout_s=5))
    await replay.journal.resumed(3, [])
    await replay.reserve(make_scored("a"))
    await replay.put([make_scored("a"), make_scored("b")])
    await replay.reject(GroupOutcome("c"), "uniform")
    taken = await replay.take(2)
    await replay.commit(4, taken[::-1])
    found = journal.recover(3)
    assert [step.group_ids for step in found.steps] == [("b", "a")]
    assert (found.finished, found.rejected) == ((), ("c",))
    await replay.release(taken)
    await replay.journal.forget(4)
    assert journal.recover(4).reached == 4
    with pytest.raises(ValueError, match="group a has no lease"):
        await replay.commit(5, taken)
    await replay.close()


class SlowDisk(GroupJournal):
    """Has a finished group on disk only once `may_finish` is set."""

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.error: Exception | None = None
        self.trained_versions: list[int] = []

    async def finished(self, group: ScoredGroup) -> None:
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error

    async def trained(self, version: int, groups: Sequence[ScoredGroup], seconds: Mapping[str, float]) -> None:
        self.trained_versions.append(version)


async def test_a_slow_disk_holds_up_the_commit_and_nothing_before_it() -> None:
    disk = SlowDisk()
    replay = ReplayBuffer(journal=disk)
    await replay.reserve(make_scored("a"))
    await replay.put([make_scored("a")])
    taken = await replay.take(1)
    commit = asyncio.create_task(replay.commit(1, taken))
    assert await blocked(commit)
    assert disk.trained_versions == []
    disk.may_finish.set()
    await asyncio.wait_for(commit, 5)
    assert disk.trained_versions == [1]


async def test_a_group_that_could_not_be_fetched_is_written_again_when_it_is_committed() -> None:
    disk = SlowDisk()
    disk.error = LostObjectError("its node is gone")
    disk.may_finish.set()
    replay = ReplayBuffer(journal=disk)
    await replay.put([make_scored("a")])
    taken = await replay.take(1)
    with pytest.raises(LostObjectError):
        await replay.commit(1, taken)
    assert disk.trained_versions == []
    disk.error = None
    await replay.commit(1, taken)
    assert disk.trained_versions == [1]


async def test_closing_completes_what_is_written_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, {})
    replay = ReplayBuffer(journal=JournalWriter(journal, timeout_s=5))
    await replay.put([make_scored("a")])
    await replay.close()
    assert [group.group_id for group in journal.recover(0).finished] == ["a"]

    class FullDisk(SlowDisk):
        async def close(self) -> None:
            raise JournalError("the disk is full")

    replay = ReplayBuffer(journal=FullDisk(), close_s=0.01)
    await replay.put([make_scored("a")])
    await asyncio.wait_for(replay.close(), 5)
    assert "the disk is full" in caplog.text
