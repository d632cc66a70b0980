"""Replay: GB/s of trajectory groups through the replay buffer over raw Ray returns of the same bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.harness.stage import private_ray, scratch_config  # isort: skip  (sets what ray reads when imported)
import ray

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, interleave, rates
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import (
    FinishReason,
    GroupSummary,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
    group_num_bytes,
)
from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.runtime.ray_actors import answer
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.persistence import replay_buffer

SETTINGS = ("resources.object_store_bytes=1073741824", "replay.max_bytes=1073741824", "replay.journal=false")
TIMEOUT_S = 120.0
TARGET = 0.8
PAGE = 4096
PROMPT_TOKENS = 64
NUM_SIBLINGS = 8
TRIPS_IN_FLIGHT = 2  # on both sides: while one step's groups are consumed, the next ones are produced
UNIT = "GB/s"


@dataclass(frozen=True)
class Load:
    """The size of one round trip: about all groups of a training step."""

    name: str
    num_groups: int
    num_tokens: int  # of each of a group's 8 trajectories
    num_trips: int  # within one measurement


LARGE = Load("large", num_groups=8, num_tokens=2**18, num_trips=8)
SMALL = Load("small", num_groups=64, num_tokens=8, num_trips=4)


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One producer and one consumer actor; groups either go through the buffer or straight from one to the other."""
    with scratch_config(SETTINGS, overrides) as config, private_ray(config):
        tune_gc()  # as a run does
        return asyncio.run(_measure(effort, config))


class Producer:
    """Returns a group as a rollout actor does, or the same number of bytes as one array."""

    def __init__(self, load: Load) -> None:
        self._group = make_group(load)
        self._bytes = np.zeros(group_num_bytes(self._group), dtype=np.uint8)

    def generate(self, group_id: str) -> tuple[TrajectoryGroup, GroupSummary]:
        group = replace(self._group, prompt=replace(self._group.prompt, prompt_id=group_id))
        return group, group.summary()

    def arrays(self) -> list[np.ndarray]:
        return [array for trajectory in self._group.trajectories for array in _arrays(trajectory)]

    def array(self) -> np.ndarray:
        return self._bytes


class Consumer:
    """Fetches what the driver names, as a learner rank does, and looks at every page of it."""

    def groups(self, groups: Sequence[ScoredGroup]) -> int:
        fetched = fetch([group.group for group in groups], timeout_s=TIMEOUT_S, what="groups")
        return sum(_touch(array) for group in fetched for t in group.trajectories for array in _arrays(t))

    def arrays(self, references: Sequence[ray.ObjectRef]) -> int:
        found = ray.get(list(references), timeout=TIMEOUT_S)
        return sum(_touch(array) for value in found for array in (value if isinstance(value, list) else [value]))


def make_group(load: Load) -> TrajectoryGroup:
    """A finished group of 8 trajectories."""
    ids = np.zeros(PROMPT_TOKENS, dtype=np.int32)
    prompt = Prompt("0", "sample", "text", ids, ids)
    return TrajectoryGroup(prompt, tuple(_trajectory(load.num_tokens, index) for index in range(NUM_SIBLINGS)))


def _trajectory(num_tokens: int, index: int) -> Trajectory:
    return Trajectory(
        trajectory_id=f"0#{index}",
        actions=TokenActions(np.arange(num_tokens, dtype=np.int32)),
        behavior_logprobs=np.full(num_tokens, -1.0, dtype=np.float32),
        action_mask=np.ones(num_tokens, dtype=bool),
        weight_spans=(WeightSpan(0, 0, num_tokens),),
        finish_reason=FinishReason.LENGTH,
        response=Response("text", num_tokens, is_truncated=True),
    )


def _arrays(trajectory: Trajectory) -> tuple[np.ndarray, ...]:
    return trajectory.actions.token_ids, trajectory.behavior_logprobs, trajectory.action_mask


def _touch(array: np.ndarray) -> int:
    return int(array.view(np.uint8)[::PAGE].sum())


async def _measure(effort: Effort, config: RunConfig) -> Findings:
    found: dict[str, tuple[float, ...]] = {}
    buffer, consumer = replay_buffer(config), _actor(Consumer)
    for load in (LARGE, SMALL):
        wire = _Wire(load, _actor(Producer, load), consumer, buffer)
        sides = {
            f"buffer_{load.name}": wire.through_buffer,
            f"raw_{load.name}": wire.straight,
            f"one_{load.name}": wire.in_one_piece,
        }
        found |= await interleave(sides, effort)
    return _findings(found)


@dataclass
class _Wire:
    """Both ways from producer to consumer; each gives GB/s over a round's trips."""

    load: Load
    producer: ray.actor.ActorHandle
    consumer: ray.actor.ActorHandle
    buffer: ReplayBuffer

    async def through_buffer(self, round_number: int) -> float:
        """Producer returns groups; driver puts references, takes, hands them on; consumer fetches; driver releases."""

        async def produce(trip: int, index: int) -> ScoredGroup:
            group_id = f"{self.load.name}/{round_number}/{trip}/{index}"
            group, summary = self.producer.generate.options(num_returns=2).remote(group_id)
            arrived = await answer(summary, timeout_s=TIMEOUT_S, what=f"group {group_id}")
            scored = ScoredGroup(arrived, group, (Reward(0.0),) * NUM_SIBLINGS)
            await self.buffer.reserve(scored)
            return scored

        async def round_trip(trip: int) -> None:
            await self.buffer.put(
                await asyncio.gather(*(produce(trip, index) for index in range(self.load.num_groups)))
            )
            groups = await self.buffer.take(self.load.num_groups)
            await answer(self.consumer.groups.remote(groups), timeout_s=TIMEOUT_S, what="the consumer")
            await self.buffer.release(groups)

        return await self._rate(round_trip)

    async def straight(self, round_number: int) -> float:
        """Producer returns the arrays of a group, consumer gets them."""
        return await self._raw(self.producer.arrays)

    async def in_one_piece(self, round_number: int) -> float:
        """The same bytes as one array a group, which Ray copies with several threads."""
        return await self._raw(self.producer.array)

    async def _raw(self, produce: Any) -> float:
        async def round_trip(trip: int) -> None:
            references = [produce.remote() for _ in range(self.load.num_groups)]
            await answer(self.consumer.arrays.remote(references), timeout_s=TIMEOUT_S, what="the consumer")

        return await self._rate(round_trip)

    async def _rate(self, round_trip: Callable[[int], Awaitable[None]]) -> float:
        in_flight = asyncio.Semaphore(TRIPS_IN_FLIGHT)

        async def next_trip(trip: int) -> None:
            async with in_flight:
                await round_trip(trip)

        started = time.perf_counter()
        await asyncio.gather(*(next_trip(trip) for trip in range(self.load.num_trips)))
        seconds = time.perf_counter() - started
        return self.load.num_trips * self.load.num_groups * group_num_bytes(make_group(self.load)) / seconds / 1e9


def _actor(role: type, *args: object) -> ray.actor.ActorHandle:
    env = {"OMP_NUM_THREADS": "1"}
    return ray.remote(role).options(num_cpus=0, runtime_env={"env_vars": env}).remote(*args)


def _findings(found: dict[str, tuple[float, ...]]) -> Findings:
    what = {
        "buffer": "producer returns groups, references through the ReplayBuffer, consumer fetches",
        "raw": "producer returns the arrays of a group, consumer gets them",
        "one": "producer returns as many bytes in one array a group, consumer gets it",
    }
    series = {
        f"{side}_{load.name}": Measurements(f"{what[side]} ({load.name})", UNIT, found[f"{side}_{load.name}"])
        for load in (LARGE, SMALL)
        for side in what
    }
    loads = {
        load.name: {
            "groups": load.num_groups,
            "trips_in_one_measurement": load.num_trips,
            "trajectories": NUM_SIBLINGS,
            "tokens": load.num_tokens,
            "bytes_of_a_group": group_num_bytes(make_group(load)),
        }
        for load in (LARGE, SMALL)
    }
    claims = (
        Claim("buffer / raw returns, large groups", rates(series["buffer_large"], series["raw_large"]), TARGET),
        Claim("buffer / raw returns, small groups", rates(series["buffer_small"], series["raw_small"])),
        Claim("buffer / returns in one piece, large groups", rates(series["buffer_large"], series["one_large"])),
    )
    return Findings({"loads": loads, "trips_in_flight": TRIPS_IN_FLIGHT}, series, claims)
