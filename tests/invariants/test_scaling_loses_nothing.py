"""Whatever dies, joins, drains and leaves: every piece of work is done once, nowhere beyond a worker's bound."""

from __future__ import annotations

import asyncio
from collections import Counter

from fakes import FakeHosts, settle
from hypothesis import given
from hypothesis import strategies as st

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.workers.status import RestartPolicy, WorkerState
from mobula.cluster.workers.work_queue import WorkQueue

MAX_LOAD = 2
NEVER_EXHAUSTED = RestartPolicy(max_restarts=10_000, window_s=1e9, backoff_s=0, max_backoff_s=0)

turns = st.integers(0, 6)
events = st.lists(st.tuples(turns, st.sampled_from(["scale", "kill"]), st.integers(1, 5)), max_size=12)


class Worker:
    """Takes `num_turns` of the event loop over each piece of work, and dies when the test ends it."""

    def __init__(self) -> None:
        self.is_dead = False
        self.load = 0
        self.max_load = 0

    async def do(self, num_turns: int) -> None:
        self.load += 1
        self.max_load = max(self.max_load, self.load)
        try:
            for _ in range(num_turns):
                await asyncio.sleep(0)
                if self.is_dead:
                    raise WorkerDiedError("killed")
        finally:
            self.load -= 1


@given(lengths=st.lists(turns, max_size=25), plan=events)
def test_every_piece_of_work_is_done_once_whatever_happens_to_the_workers(
    lengths: list[int], plan: list[tuple[int, str, int]]
) -> None:
    asyncio.run(_play(lengths, plan))


async def _play(lengths: list[int], plan: list[tuple[int, str, int]]) -> None:
    workers: list[Worker] = []

    def make(index: int) -> Worker:
        workers.append(Worker())
        return workers[-1]

    first = [make(0), make(1)]
    hosts = FakeHosts(make, booked=2)
    done: Counter[int] = Counter()

    async def join(name: str, handle: Worker) -> None:
        await asyncio.sleep(0)

    work = WorkQueue(
        "judge",
        first,
        hosts,
        max_load=MAX_LOAD,
        restarts=NEVER_EXHAUSTED,
        alive_s=1,
        join=join,
        on_lost=lambda error: None,
    )

    async def do(index: int, num_turns: int) -> None:
        is_done = False
        while not is_done:
            async with work.slot() as slot:
                try:
                    await slot.handle.do(num_turns)
                    is_done = True
                except WorkerDiedError as error:
                    work.lose(slot, error)
        done[index] += 1

    tasks = [asyncio.create_task(do(index, num_turns)) for index, num_turns in enumerate(lengths)]
    wanted = 2
    for num_turns, event, number in plan:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if event == "scale":
            wanted = number
            await work.pool.scale(number)
        elif work.handles:
            work.handles[number % len(work.handles)].is_dead = True
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks)
    await settle()
    await settle()

    assert done == Counter(range(len(lengths)))
    assert max(worker.max_load for worker in workers) <= MAX_LOAD
    serving = [worker for worker in work.pool.status() if worker.state is WorkerState.SERVING]
    assert len(serving) == len(work.pool.status()) == wanted
    assert len(hosts.booked) == wanted, "a place was lost, or is booked for no worker"
