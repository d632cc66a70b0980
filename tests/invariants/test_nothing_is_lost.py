"""No prompt and no token is lost or trained twice: faults, kills and scaling in whole runs of fakes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHosts, FakeLearner, FakePrompts, make_prompt, settle
from hypothesis import given
from hypothesis import strategies as st
from interrupted import KnownSampler, content
from runs import Run

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.records.partial_response import Attempt, SampledSequence, TokenChunk
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import PROMPTS, TOKENS_KEPT, TOKENS_LOST, InFlightRequest, InFlightRequests
from mobula.cluster.workers.status import RestartPolicy, WorkerState
from mobula.cluster.workers.work_queue import WorkQueue

STEPS, SIZE = 6, 3


class Killed(BaseException):
    """What SIGKILL looks like from inside: nothing catches it, nothing is saved after it."""


def kill_at(version: int) -> Callable[[int], None]:
    def kill(offered: int) -> None:
        if offered == version:
            raise Killed

    return kill


def uneven(prompt_id: str) -> int:
    return random.Random(prompt_id).choice([0, 1, 2, 8, 30])


def small_run(folder: Path, **options: Any) -> Run:
    return Run(folder, total_steps=STEPS, prompts_per_step=SIZE, pauses=uneven, **options)


def first_prompts(num: int) -> list[str]:
    prompts = FakePrompts(epoch_size=50)
    return [prompts.id_at(index) for index in range(num)]


def flat(steps: list[list[str]]) -> list[str]:
    return [prompt_id for step in steps for prompt_id in step]


@pytest.mark.parametrize("killed_at", range(STEPS + 1))
async def test_a_killed_and_resumed_run_trains_the_same_prompts_in_order(tmp_path: Path, killed_at: int) -> None:
    whole = small_run(tmp_path / "whole")
    await whole.go()
    assert flat(whole.learner.prompt_ids) == first_prompts(STEPS * SIZE)

    killed = small_run(tmp_path / "killed", on_version=kill_at(killed_at))
    with pytest.raises(Killed):
        await killed.go()
    resumed = small_run(tmp_path / "killed")
    assert await resumed.go() == STEPS
    saved = max(0, killed_at - 1)  # step `killed_at` was trained but not saved: it is trained again from `saved`
    assert killed.learner.prompt_ids[:saved] + resumed.learner.prompt_ids == whole.learner.prompt_ids
    assert (killed.num_prepared, resumed.num_prepared) == (1, 0), "the warm start is done once"


@pytest.mark.parametrize("max_staleness", [1, 3])
async def test_a_run_killed_again_and_again_loses_no_prompt(tmp_path: Path, max_staleness: int) -> None:
    trained: list[list[str]] = []
    for killed_at in range(2, STEPS + 2):
        slow = FakeLearner(num_turns=100)
        run = small_run(tmp_path, max_staleness=max_staleness, on_version=kill_at(killed_at), learner=slow)
        if killed_at <= STEPS:
            with pytest.raises(Killed):
                await run.go()
            trained += run.learner.prompt_ids[:-1]  # the last step was not saved
        else:
            await run.go()
            trained += run.learner.prompt_ids
        for version, groups in run.learner.trained:
            assert all(version - group.summary.oldest_version <= max_staleness for group in groups)
    known = flat(trained)
    assert len(known) == len(set(known)) == STEPS * SIZE
    handed_out = first_prompts(len(known) + len(run.dispatcher.pending()))
    assert sorted([*known, *run.dispatcher.pending()]) == sorted(handed_out)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)

PROMPT = make_prompt("0/0/s0")


def settings(lengths: list[int]) -> SamplingSettings:
    return SamplingSettings(len(lengths), 0.0, max_tokens=40, seed=0)


async def attempt(
    in_flight: InFlightRequest, lengths: list[int], chunk: int, dies_at: int | None, version: int, num_reports: int
) -> list[SampledSequence] | None:
    """One try, on an engine that dies before its step `dies_at`; of what it reports the first `num_reports` arrive."""
    attempt, reports = in_flight.next_attempt(), []

    async def before_step(step: int) -> None:
        if step == dies_at:
            raise WorkerDiedError("SIGKILL")

    def emit(chunks: list[TokenChunk], siblings: Sequence[SampledSequence]) -> None:
        if len(reports) < num_reports:
            reports.append(chunks)
            for new_chunk in chunks:
                in_flight.add(new_chunk)

    engine = KnownSampler(lengths, chunk, before_step, version)
    try:
        return await engine.sample(PROMPT, (), settings(lengths), attempt, emit)
    except WorkerDiedError:
        return None


@given(
    lengths=LENGTHS,
    chunk=st.integers(1, 12),
    deaths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6),
)
def test_interrupted_groups_equal_whole_ones(lengths: list[int], chunk: int, deaths: list[tuple[int, int]]) -> None:
    async def go() -> None:
        whole = await KnownSampler(lengths, chunk).sample(
            PROMPT, (), settings(lengths), Attempt("whole"), lambda chunks, siblings: None
        )
        in_flight_requests, group, version = InFlightRequests(chunk), None, 0
        with in_flight_requests.held(PROMPT, settings(lengths)) as in_flight:
            for version, (dies_at, num_reports) in enumerate(deaths):
                known = in_flight.num_tokens
                group = await attempt(in_flight, lengths, chunk, dies_at, version, num_reports)
                assert in_flight.num_tokens >= known
                if group is not None:
                    break
            else:
                version = len(deaths)
                group = await attempt(in_flight, lengths, chunk, None, version, 99)
        assert [content(s) for s in group] == [content(s) for s in whole]
        for sequence in group:
            versions = [span.version for span in sequence.weight_spans]
            assert versions == sorted(set(versions)) and versions[-1] <= version
        assert in_flight_requests.resumed[PROMPTS] == version
        assert in_flight_requests.resumed[TOKENS_KEPT] <= sum(lengths)

    asyncio.run(go())


@given(lengths=LENGTHS, chunk=st.integers(1, 12), dies_at=st.integers(0, 39))
def test_a_death_costs_less_than_one_chunk_of_each_response(lengths: list[int], chunk: int, dies_at: int) -> None:
    async def go() -> None:
        in_flight_requests = InFlightRequests(chunk)
        with in_flight_requests.held(PROMPT, settings(lengths)) as in_flight:
            if await attempt(in_flight, lengths, chunk, dies_at, 0, 99) is not None:
                return
            lost = [min(dies_at, n) - s.num_tokens for n, s in zip(lengths, in_flight.siblings, strict=True)]
            assert all(0 <= tokens < chunk for tokens in lost)
            in_flight.next_attempt()
            assert in_flight_requests.resumed[TOKENS_KEPT] + sum(lost) == sum(min(dies_at, n) for n in lengths)
            assert sum(lost) <= in_flight_requests.resumed[TOKENS_LOST]

    asyncio.run(go())


@pytest.mark.parametrize("chunk", [1, 3])
def test_siblings_that_run_side_by_side_are_reported_together(chunk: int) -> None:
    reports: list[list[TokenChunk]] = []
    engine = KnownSampler([12] * 8, chunk)
    sampling = engine.sample(PROMPT, (), settings([12] * 8), Attempt("a"), lambda chunks, _: reports.append(chunks))
    asyncio.run(sampling)
    assert len(reports) == 11 // chunk
    assert all({new_chunk.sibling for new_chunk in report} == set(range(8)) for report in reports)


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
def test_work_is_done_once_whatever_happens_to_workers(lengths: list[int], plan: list[tuple[int, str, int]]) -> None:
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
        "judge", first, hosts, max_load=MAX_LOAD, restarts=NEVER_EXHAUSTED, alive_s=1, join=join,
        on_lost=lambda error: None,
    )  # fmt: skip

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
