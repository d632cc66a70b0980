"""Groups on a real cluster: lost objects, actors that are killed within a group, announced values, and the journal."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from fakes import make_group, make_prompt, make_scored
from interrupted import token_at
from known_roles import KnownRollout
from small_cluster import PROMPTS_PER_STEP, Shape, SmallRun, lasting_pool, start
from test_faults import expected

from mobula.actors.rollout.client import RolloutClient
from mobula.cluster.errors import RolloutError, WorkerDiedError
from mobula.cluster.records.trajectory import EndedResponse, FinishReason, ScoredGroup, TrajectoryGroup
from mobula.cluster.replay.journal import Journal
from mobula.cluster.replay.journal_writer import JournalWriter
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import PROMPTS, TOKENS_KEPT, TOKENS_LOST, InFlightRequests
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.runtime.ray_actors import kill, with_attachments

NUM_STEPS, RESTORED_AT = 7, 5  # the newest checkpoint is of version 3 then


@ray.remote(num_cpus=0)
class _Owner:
    def put(self) -> list[ray.ObjectRef]:
        return [ray.put(b"x" * 200_000)]


@pytest.fixture
def nowhere(local_ray: str) -> ray.ObjectRef:
    """A reference to what is lost."""
    owner = _Owner.remote()
    [reference] = ray.get(owner.put.remote())
    ray.kill(owner)
    return reference


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
async def test_groups_lost_before_copy_update_or_later_are_made_again(tmp_path: Path, nowhere: ray.ObjectRef) -> None:
    lost: list[str] = []

    async def act(version: int) -> None:
        if version == 0:
            _lose_some_before_their_copy(run, nowhere, lost)
            _lose_some_before_their_score(run, nowhere)
            _lose_some_before_their_update(run, nowhere)
        if version == RESTORED_AT:
            trained = run._learner.lost_ranks._trained
            trained[:] = [(made, [replace(group, group=nowhere) for group in groups]) for made, groups in trained]
            assert max(made for made, _ in trained) == RESTORED_AT
            os.kill(run.saboteur.process_id("learner/1"), signal.SIGKILL)

    run = SmallRun(tmp_path, Shape(total_steps=NUM_STEPS, num_engines=1, num_rewards=1), on_version=act)
    assert await run.go() == NUM_STEPS
    assert [sorted(step) for step in run.trained] == [sorted(step) for step in expected(NUM_STEPS)]
    assert run.losses["learner_died"] == 1, run.losses
    assert run.losses["group_LostObjectError"] == len(lost) > 3, "only what no journal has is sampled again"


def _lose_some_before_their_copy(run: SmallRun, nowhere: ray.ObjectRef, lost: list[str]) -> None:
    """The journal cannot have them."""
    reserve = run.replay.reserve

    async def losing(group: ScoredGroup) -> None:
        if run.prompts.index_of(group.summary.group_id) % 5 == 2:
            lost.append(group.summary.group_id)
            group = replace(group, group=nowhere)
        await reserve(group)

    run.replay.reserve = losing


def _lose_some_before_their_score(run: SmallRun, nowhere: ray.ObjectRef) -> None:
    """The journal has them."""
    take = run.replay.take

    async def losing(num_groups: int) -> list[ScoredGroup]:
        first, *others = await take(num_groups)
        return [replace(first, group=nowhere), *others]

    run.replay.take = losing


def _lose_some_before_their_update(run: SmallRun, nowhere: ray.ObjectRef) -> None:
    """The journal has the one, and the reference can score the other again."""
    score = run.reference.score

    async def losing(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        scored = await score(groups)
        if len(groups) == PROMPTS_PER_STEP:
            scored[1] = replace(scored[1], group=nowhere)
            scored[2] = replace(scored[2], reference_logprobs=nowhere)
        return scored

    run.reference.score = losing


CHUNK = 8

LENGTHS = (90, 30, 75)

DIES_AT = 55  # steps; the last chunk before it had left 7 steps before

SETTINGS = SamplingSettings(len(LENGTHS), 0.0, max_tokens=100, seed=0)

PROMPT = make_prompt("0/0/s0")

DEADLINES_S = {"start_s": 90, "rollout_s": 30, "sync_s": 10, "sign_s": 10, "probe_s": 10, "stop_s": 1}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_actor_costs_less_than_one_chunk_of_each_response(local_ray: str, tmp_path: Path) -> None:
    ended: list[EndedResponse] = []
    in_flight_requests, retries, handles = InFlightRequests(CHUNK, on_ended=ended.append), Counter[str](), []

    async def spawn(index: int) -> RolloutClient:
        role = (tmp_path, LENGTHS, CHUNK, DIES_AT, 0.03)
        handles.append(start(KnownRollout, f"rollout/{index}", *role, max_concurrency=8, options={}))
        return RolloutClient(handles[-1], f"rollout/{index}", in_flight_requests=in_flight_requests, **DEADLINES_S)

    pool = lasting_pool(spawn)
    await pool.start()
    rollouts = RetryingRollouts(pool, in_flight_requests, max_retries=1, on_retry=lambda kind: retries.update([kind]))
    reference, summary, _ = await rollouts.generate(PROMPT, SETTINGS)
    await pool.close()

    assert retries == {"WorkerDiedError": 1}
    sampled = [min(DIES_AT, length) for length in LENGTHS]
    assert in_flight_requests.resumed[PROMPTS] == 1
    assert in_flight_requests.resumed[TOKENS_KEPT] >= sum(sampled) - 2 * (CHUNK - 1)
    assert in_flight_requests.resumed[TOKENS_KEPT] / sum(sampled) >= 1 - CHUNK / max(sampled)
    assert in_flight_requests.resumed[TOKENS_LOST] == 2 * (CHUNK - 1)

    [group] = await asyncio.to_thread(fetch, [reference], timeout_s=10, what="the group of an actor that is gone")
    assert group.summary() == summary
    assert [t.num_steps for t in group.trajectories] == list(LENGTHS)
    for index, trajectory in enumerate(group.trajectories):
        ids = [token_at(PROMPT.prompt_id, index, position) for position in range(LENGTHS[index])]
        assert trajectory.actions.token_ids.tolist() == ids
        assert trajectory.behavior_logprobs.tolist() == [-position for position in range(LENGTHS[index])]
        assert trajectory.finish_reason is FinishReason.STOP
    assert in_flight_requests.summary().num_prompts == 0
    [first, *others] = ended  # the shortest one, before the actor was killed; it is not reported again
    assert (first.sibling, first.response) == (1, group.trajectories[1].response)
    assert [(it.sibling, it.response) for it in others] in ([], [(2, group.trajectories[2].response)])


BYTES = 4 << 20  # of a value that lives in the object store

FEW, MANY = 1, BYTES // 8


class Announcer:
    """Each value holds how many follow; `size` is how many numbers those have."""

    async def announce(self, numbers: list[int], size: int, pause_s: float) -> AsyncIterator[Any]:
        for place, number in enumerate(numbers):
            yield (place, number)
            for index in range(number):
                await asyncio.sleep(pause_s)  # so that the next value is not there when it is asked for
                yield np.full(size, 10 * place + index)

    async def breaks_its_word(self, how: str) -> AsyncIterator[Any]:
        yield (0, 1)
        yield np.full(FEW, 0)
        yield (1, 3)
        yield np.full(FEW, 10)
        if how == "dies":
            await asyncio.sleep(0.5)  # what was sent is on its way
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise RolloutError("no more of it")


def announced(value: tuple[int, int]) -> int:
    return value[1]


async def received(stream: Any) -> AsyncIterator[tuple[int, list[Any]]]:
    async for (place, _), references in with_attachments(stream, announced, what="what it announces"):
        yield place, references


@pytest.fixture(scope="module")
def announcer(local_ray: str) -> Any:
    handle = start(Announcer, "announcer", max_concurrency=4, options={})
    yield handle
    kill(handle)


@pytest.mark.parametrize(("size", "pause_s"), [(FEW, 0.0), (FEW, 0.02), (MANY, 0.0), (MANY, 0.02)])
async def test_each_value_comes_with_references_to_its_own(announcer: Any, size: int, pause_s: float) -> None:
    numbers = [0, 3, 1, 0, 2]
    stream = announcer.announce.options(num_returns="streaming").remote(numbers, size, pause_s)
    found = [(place, references) async for place, references in received(stream)]
    assert [place for place, _ in found] == list(range(len(numbers)))
    for place, references in found:
        values = await asyncio.to_thread(fetch, references, timeout_s=20, what="what belongs to a value")
        assert [value[0] for value in values] == [10 * place + index for index in range(numbers[place])]
        assert all(value.shape == (size,) for value in values)


@pytest.mark.parametrize(
    ("how", "error"), [("raises", RolloutError), ("returns", RuntimeError), ("dies", WorkerDiedError)]
)
async def test_an_actor_that_ends_before_all_came_is_an_error(announcer: Any, how: str, error: type[Exception]) -> None:
    stream = announcer.breaks_its_word.options(num_returns="streaming").remote(how)
    found = []
    with pytest.raises(error):
        async with asyncio.timeout(60):
            async for place, references in received(stream):
                found.append((place, references))
    [(place, [reference])] = found
    assert (place, (await asyncio.to_thread(ray.get, reference, timeout=20))[0]) == (0, 0)


MANY_TOKENS = 2**16  # too many for a message: the group is in the object store


class Slow:
    """Gives a group back as soon as there is a file `once`."""

    def give(self, group: TrajectoryGroup, once: Path) -> TrajectoryGroup:
        while not once.exists():
            time.sleep(0.01)
        return group


@pytest.mark.timeout(240)
async def test_a_late_group_holds_up_nothing_and_is_written_once_it_is_there(local_ray: str, tmp_path: Path) -> None:
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
