"""A replay buffer that is lost is made anew as it was: nothing in it is lost, and nothing is handed out twice."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from fakes import make_scored
from handles import LocalHandle
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import AtOnce
from waiting import until

from cluster.errors import DeadlineError, WorkerDiedError
from cluster.replay.buffer import ReplayBuffer
from cluster.replay.client import ReplayClient, ReplayDeadlines
from cluster.replay.journal import Journal
from cluster.replay.journal_writer import JournalWriter
from cluster.replay.restartable_replay import RestartableReplay
from cluster.workers.restart_policy import RestartBudget, RestartPolicy

POLICY = RestartPolicy(max_restarts=200, window_s=1000, backoff_s=0.0001, max_backoff_s=0.001)


class Process:
    """One buffer, and how it fails: a call that comes when it is dead fails, one that finds it hung waits."""

    def __init__(self, folder: Path | None, max_bytes: float) -> None:
        self.journal = Journal(folder, {"seed": 0}) if folder else None
        writer = JournalWriter(self.journal, timeout_s=5, start_thread=AtOnce) if self.journal else None
        self.buffer = ReplayBuffer(journal=writer, max_bytes=max_bytes)
        self.calls: list[str] = []
        self.is_dead = False
        self.is_hung = False
        self.dies_after: str | None = None  # the call that it carries out, but does not answer

    def __getattr__(self, name: str):
        async def call(*args):
            self.calls.append(name)
            if self.is_hung:
                await asyncio.Event().wait()
            self._refuse_if_dead()
            if name == "is_alive":
                return True
            result = await getattr(self.buffer, name)(*args)
            if self.dies_after == name:
                self.is_dead = True
            self._refuse_if_dead()
            return result

        return call

    def _refuse_if_dead(self) -> None:
        if self.is_dead:
            raise WorkerDiedError("replay/0 died")


class Client(ReplayClient):
    def __init__(self, process: Process) -> None:
        super().__init__(LocalHandle(process), ReplayDeadlines(5, 0.2, 0.2, 0.2, 0.2), is_journalled=True)
        self._process = process

    def kill(self) -> None:
        self._process.is_dead = True

    async def close(self) -> None:
        self.kill()


class Bench:
    def __init__(
        self,
        folder: Path | None = None,
        policy: RestartPolicy = POLICY,
        max_bytes: float = float("inf"),
        take_s: float = 5,
    ) -> None:
        self.processes: list[Process] = []
        self.losses: list[str] = []
        self._folder = folder
        self._max_bytes = max_bytes
        first = self._start()
        self.replay = RestartableReplay(
            first,
            self._spawn,
            max_bytes=max_bytes,
            take_s=take_s,
            budget=RestartBudget(policy),
            on_lost=self.losses.append,
        )

    @property
    def process(self) -> Process:
        return self.processes[-1]

    def _start(self) -> Client:
        self.processes.append(Process(self._folder, self._max_bytes))
        return Client(self.process)

    async def _spawn(self) -> Client:
        return self._start()


def ids(groups) -> list[str]:
    return [group.summary.group_id for group in groups]


def scored(*numbers: int):
    return [make_scored(f"0/{n}/s{n}") for n in numbers]


async def called(bench: Bench, name: str) -> None:
    """Wait until some process of the buffer was asked for `name`."""
    await until(lambda: any(name in process.calls for process in bench.processes))


async def answered(bench: Bench) -> None:
    """A call that needs the buffer, behind all that it was to be told in turn, and changes nothing."""
    await bench.replay.abort([])


async def test_a_buffer_that_died_comes_back_with_what_was_reserved_ready_and_leased_in_order() -> None:
    bench = Bench()
    await bench.replay.put(scored(0, 1, 2, 3))
    await bench.replay.reserve(*scored(4))
    await bench.replay.reject("0/5/s5", "uniform")
    leased = await bench.replay.take(2)
    bench.process.is_dead = True
    await answered(bench)
    stats = await bench.replay.stats()
    assert (stats.num_ready, stats.num_taken, stats.num_rejected) == (2, 2, {"uniform": 1})
    assert stats.num_bytes == sum(group.summary.num_bytes for group in scored(0, 1, 2, 3, 4))
    await bench.replay.release(leased)
    await bench.replay.put(scored(4))
    assert ids(await bench.replay.take(3)) == ["0/2/s2", "0/3/s3", "0/4/s4"]
    assert bench.losses == ["replay_died"]


@pytest.mark.parametrize("call", ["reserve_all", "make_ready", "lease", "end_leases", "abort", "reject", "commit"])
async def test_a_call_that_was_carried_out_but_not_answered_counts_once(call: str) -> None:
    bench = Bench()
    await bench.replay.put(scored(0, 1))
    leased = await bench.replay.take(1)
    bench.process.dies_after = call
    await bench.replay.reserve(*scored(2))
    await called(bench, "reserve_all")
    await bench.replay.put(scored(2))
    await bench.replay.reject("0/9/s9", "stale")
    await bench.replay.commit(1, leased)
    await bench.replay.abort(leased)
    first = await bench.replay.take(2)
    await bench.replay.release(first)
    assert ids(first) + ids(await bench.replay.take(1)) == ["0/0/s0", "0/1/s1", "0/2/s2"]
    await answered(bench)
    assert (await bench.replay.stats()).num_rejected == {"stale": 1}
    assert len(bench.processes) == 2


async def test_a_reserve_that_waited_for_room_and_was_not_answered_counts_once() -> None:
    bench = Bench(max_bytes=1)
    bench.process.dies_after = "reserve"
    await bench.replay.reserve(*scored(0))
    assert "reserve" in bench.processes[0].calls
    await bench.replay.put(scored(0))
    assert ids(await bench.replay.take(1)) == ["0/0/s0"]
    assert len(bench.processes) == 2


async def test_groups_that_finish_within_a_moment_are_told_together() -> None:
    bench = Bench()
    for group in scored(0, 1, 2):
        await bench.replay.reserve(group)
    assert bench.process.calls == []
    await called(bench, "reserve_all")
    assert (await bench.process.buffer.stats()).num_bytes == sum(group.summary.num_bytes for group in scored(0, 1, 2))
    await bench.replay.reserve(*scored(3))
    await bench.replay.reject("0/3/s3", "stale")
    assert bench.process.calls == ["reserve_all", "reject"]


async def test_how_much_it_holds_is_known_without_asking_the_buffer() -> None:
    bench = Bench(max_bytes=sum(group.summary.num_bytes for group in scored(0, 1)))
    await bench.replay.put(scored(0, 1))
    [taken] = await bench.replay.take(1)
    await answered(bench)
    bench.process.is_hung = True
    bench.process.calls.clear()
    waiting = asyncio.create_task(bench.replay.reserve(*scored(2)))
    await asyncio.sleep(0.01)
    stats = await bench.replay.stats()
    assert (stats.num_ready, stats.num_taken, stats.num_waiting, stats.num_oversized) == (1, 1, 1, 0)
    assert (stats.num_bytes, stats.oldest_id) == (2 * taken.summary.num_bytes, taken.summary.group_id)
    assert 0.01 <= stats.oldest_age_s < 5
    assert bench.process.calls == ["reserve"]
    waiting.cancel()


async def test_a_step_that_is_put_brings_those_of_its_groups_that_the_buffer_has_not_heard_of() -> None:
    bench = Bench()
    await bench.replay.reserve(*scored(0))
    await called(bench, "reserve_all")
    await bench.replay.reserve(*scored(1))
    await bench.replay.put(scored(1, 0))
    taken = await bench.replay.take(2)
    await called(bench, "lease")
    assert bench.process.calls == ["reserve_all", "make_ready", "lease"]
    assert ids(taken) == ["0/1/s1", "0/0/s0"]
    assert all(group.group is not None for group in taken)


async def test_a_take_waits_for_no_answer_of_the_buffer() -> None:
    bench = Bench()
    bench.process.is_hung = True
    await bench.replay.put(scored(0, 1))
    assert ids(await bench.replay.take(2)) == ["0/0/s0", "0/1/s1"]


async def test_a_take_waits_for_rollouts_but_not_for_ever() -> None:
    bench = Bench(take_s=0.1)
    await bench.replay.put(scored(0))
    with pytest.raises(DeadlineError, match=r"waited 0\.1 s for replay/0 to hold 2 finished groups, it has 1"):
        await bench.replay.take(2)
    assert ids(await bench.replay.take(1)) == ["0/0/s0"]
    assert bench.losses == []


async def test_a_take_that_waits_gets_what_comes_after_a_loss() -> None:
    bench = Bench()
    taking = asyncio.create_task(bench.replay.take(2))
    await bench.replay.put(scored(0))
    bench.process.is_dead = True
    bench.replay.lose(WorkerDiedError("replay/0 died"))
    await bench.replay.put(scored(1))
    assert ids(await taking) == ["0/0/s0", "0/1/s1"]
    await answered(bench)
    assert len(bench.processes) == 2


async def test_a_buffer_that_hangs_is_replaced_at_its_deadline_or_when_somebody_has_noticed() -> None:
    bench = Bench()
    await bench.replay.put(scored(0))
    await bench.replay.reserve(*scored(1))
    bench.process.is_hung = True
    await bench.replay.put(scored(1))
    await answered(bench)
    assert bench.losses == ["replay_hung"]
    taking = asyncio.create_task(bench.replay.take(3))
    await asyncio.sleep(0)
    bench.process.is_hung = True
    bench.replay.lose(DeadlineError("replay/0 did not answer a ping"))
    await bench.replay.put(scored(2))
    assert ids(await taking) == ["0/0/s0", "0/1/s1", "0/2/s2"]
    await answered(bench)
    assert bench.losses == ["replay_hung"] * 2
    assert all(process.is_dead for process in bench.processes[:-1])


async def test_a_reserve_that_waits_for_room_too_long_says_nothing_of_the_buffer() -> None:
    bench = Bench(max_bytes=1)
    await bench.replay.put(scored(0))
    await answered(bench)
    with pytest.raises(DeadlineError, match="backpressure_s"):
        await bench.replay.reserve(*scored(1))
    assert bench.losses == []


async def test_a_group_that_comes_twice_is_a_duplicate_also_for_a_new_buffer() -> None:
    bench = Bench()
    await bench.replay.put(scored(0))
    await bench.replay.release(await bench.replay.take(1))
    bench.process.is_dead = True
    await bench.replay.put(scored(0))
    await answered(bench)
    stats = await bench.replay.stats()
    assert (stats.num_ready, stats.num_rejected) == (0, {"duplicate": 1})


async def test_what_is_asked_of_a_buffer_that_was_replaced_meanwhile_says_nothing() -> None:
    bench = Bench()
    bench.process.is_hung = True
    asked = asyncio.create_task(bench.replay.ping())
    await asyncio.sleep(0)
    bench.replay.lose(WorkerDiedError("replay/0 died"))
    await bench.replay.put(scored(0))
    await asked
    bench.process.is_dead = True
    with pytest.raises(WorkerDiedError):
        await bench.replay.ping()


async def test_what_fails_behind_a_put_is_raised_by_the_next_call() -> None:
    bench = Bench(policy=RestartPolicy(max_restarts=0, window_s=1000, backoff_s=0, max_backoff_s=0))
    bench.process.is_dead = True
    await bench.replay.put(scored(0))
    with pytest.raises(WorkerDiedError, match="resume=auto"):
        await answered(bench)
    with pytest.raises(WorkerDiedError, match="resume=auto"):
        await bench.replay.take(1)
    with pytest.raises(WorkerDiedError, match="resume=auto"):
        await bench.replay.put(scored(1))


async def test_steps_are_put_one_after_the_other() -> None:
    bench = Bench(max_bytes=1)
    puts = [asyncio.create_task(bench.replay.put(scored(number))) for number in range(4)]
    found = []
    for _ in range(4):
        taken = await bench.replay.take(1)
        found += ids(taken)
        await bench.replay.release(taken)
    await asyncio.gather(*puts)
    assert found == ["0/0/s0", "0/1/s1", "0/2/s2", "0/3/s3"]


async def test_the_budget_ends_it() -> None:
    bench = Bench(policy=RestartPolicy(max_restarts=2, window_s=1000, backoff_s=0.0001, max_backoff_s=0.001))
    for _ in range(2):
        bench.process.is_dead = True
        await answered(bench)
    bench.process.is_dead = True
    with pytest.raises(WorkerDiedError, match=r"the replay was lost 3 times, .*resume=auto"):
        await answered(bench)


async def test_the_journal_of_the_new_buffer_goes_on_where_the_old_one_ended(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.replay.resume(0, ())
    await bench.replay.put(scored(0, 1, 2))
    first = await bench.replay.take(1)
    bench.process.dies_after = "commit"
    await bench.replay.commit(1, first)
    await bench.replay.release(first)
    await bench.replay.reject("0/3/s3", "uniform")
    second = await bench.replay.take(1)
    bench.process.is_dead = True
    await bench.replay.commit(2, second)
    await bench.process.buffer.close()

    found = Journal(tmp_path, {"seed": 0}).recover(0)
    assert [step.group_ids for step in found.steps] == [("0/0/s0",), ("0/1/s1",)]
    assert ([group.group_id for group in found.finished], found.rejected) == (["0/2/s2"], ("0/3/s3",))


@given(st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=40)
def test_whenever_it_dies_every_group_is_taken_once_and_in_order(seed: int, num_groups: int) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        bench = Bench()
        taken: list[str] = []

        async def produce() -> None:
            for n in range(num_groups):
                await bench.replay.put(scored(n))

        async def consume() -> None:
            while len(taken) < num_groups:
                groups = await bench.replay.take(1)
                if rng.random() < 0.2:
                    await bench.replay.abort(groups)
                else:
                    taken.extend(ids(groups))
                    await bench.replay.release(groups)

        async def sabotage() -> None:
            for _ in range(30):
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    bench.process.is_dead = True
                else:
                    bench.process.dies_after = rng.choice(
                        ["reserve_all", "make_ready", "lease", "end_leases", "restore"]
                    )
                if rng.random() < 0.5:
                    bench.replay.lose(WorkerDiedError("replay/0 died"))
                await asyncio.sleep(0.001)

        saboteur = asyncio.create_task(sabotage())
        async with asyncio.timeout(20):
            await asyncio.gather(produce(), consume())
        saboteur.cancel()
        assert taken == ids(scored(*range(num_groups)))

    asyncio.run(run())


async def test_a_buffer_that_was_closed_is_not_brought_back_for_whoever_still_asks() -> None:
    bench = Bench()
    await bench.replay.put(scored(0))
    await answered(bench)
    await bench.replay.close()
    with pytest.raises(WorkerDiedError):
        await answered(bench)
    assert len(bench.processes) == 1 and bench.losses == []
