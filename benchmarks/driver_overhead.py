"""Driver overhead: CPU time of the driver process per trajectory, with 8 to 1,024 groups in flight.

Once with every role but the driver's own parts faked in its process, and once through Ray: engines and reward workers
answer from other processes, and groups stay behind as references to the object store. The buffer is the real one.
CPU time of the whole process, all threads, so that waiting costs nothing and a busy machine little.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.stage import private_ray, scratch_config  # isort: skip  (sets what ray reads when imported)
import ray

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, Side, interleave
from benchmarks.replay import Load, make_group
from benchmarks.simulation.simulated_run import KEEP_ALL, DelayedRewards, NumberedPrompts
from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.server import PromptServer
from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import Generated, GroupReport, GroupSummary, Prompt, TrajectoryGroup
from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.roles import Rewards, Rollouts, SamplingSettings
from mobula.cluster.rollout.dispatcher import RolloutDispatcher
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.rollout.staleness import StalenessGate
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.cluster.workers.status import RestartPolicy
from mobula.configs.schema import Recipe, RunConfig
from mobula.configs.schema.rewards import SHARED_SERVICE
from mobula.deploy.rehearsal.simulated.engine import summary_of
from mobula.deploy.wiring.persistence import replay_buffer
from mobula.rewards.contract import Score
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool, RewardService, ServiceSettings
from mobula.rewards.pool.worker import GroupOutcomes, Question

SETTINGS = ("resources.object_store_bytes=1073741824", "replay.journal=false")
IN_FLIGHT = (8, 64, 256, 1024)  # groups
STEPS_IN_FLIGHT = 2  # a step takes half of what is in flight
MAX_STALENESS = 4
NUM_GROUPS = {"process": 2048, "ray": 1024}  # in one measurement
GROUPS_PER_S = {"process": 1000.0, "ray": 200.0}  # what the engines give together, however many there are
MAX_REPEATS = 3  # one takes a minute, and CPU time differs little from one to the next
NUM_SIBLINGS = 8
NUM_TOKENS = 2048  # of a trajectory: a group is too large to travel inside an answer
REWARD_S = 0.005
TIMEOUT_S = 120.0
NUM_ENGINES = 4
NO_RESTARTS = RestartPolicy(max_restarts=0, window_s=1, backoff_s=0, max_backoff_s=0)
MAX_MS = 1.0
FLAT = 1.5
UNIT = "CPU ms/trajectory"


@dataclass(frozen=True)
class _Roles:
    """The roles that the dispatcher works with."""

    rollouts: Rollouts
    rewards: Rewards
    replay: ReplayBuffer


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Every number in flight in turn, in the process and then through Ray."""
    effort = replace(effort, repeats=min(effort.repeats, MAX_REPEATS), warmups=1)
    found = asyncio.run(interleave(_sides("process", _local_roles), effort))
    with scratch_config(SETTINGS, overrides) as config, private_ray(config):
        found |= asyncio.run(_through_ray(effort, config))
    return _findings(found)


async def _through_ray(effort: Effort, config: RunConfig) -> dict[str, tuple[float, ...]]:
    tune_gc()  # as a run does
    scorers = ray.remote(_Scorers).options(num_cpus=0, max_concurrency=2 * max(IN_FLIGHT)).remote()
    engines = [ray.remote(_Engine).options(num_cpus=0, max_concurrency=16).remote() for _ in range(NUM_ENGINES)]
    rollout_pool = _rollout_pool(engines)
    await rollout_pool.start()
    rewards, replay = _reward_pool(scorers, config), replay_buffer(config)

    async def roles(mean_s: float) -> _Roles:
        await asyncio.gather(*(engine.pace.remote(mean_s) for engine in engines))
        return _Roles(rollout_pool, rewards, replay)

    found = await interleave(_sides("ray", roles), effort)
    await rollout_pool.close()
    await replay.close()
    return found


async def _local_roles(mean_s: float) -> _Roles:
    return _Roles(_SleepingEngines(mean_s), DelayedRewards(REWARD_S, NUM_SIBLINGS), ReplayBuffer())


def _sides(name: str, roles: Callable[[float], Awaitable[_Roles]]) -> dict[str, Side]:
    """`roles` is given the mean seconds of a group in its engine."""

    def side(num_in_flight: int) -> Side:
        async def run(round_number: int) -> float:
            prompts = NumberedPrompts(f"{num_in_flight}/{round_number}/")  # a buffer takes no id twice
            num_measured = NUM_GROUPS[name] * STEPS_IN_FLIGHT // num_in_flight
            found = await roles(num_in_flight / GROUPS_PER_S[name])
            return await _cpu_ms(found, prompts, num_in_flight, num_measured)

        return run

    return {f"{name}_{num_in_flight}": side(num_in_flight) for num_in_flight in IN_FLIGHT}


async def _cpu_ms(roles: _Roles, prompts: NumberedPrompts, num_in_flight: int, num_measured: int) -> float:
    """Of the driver per trajectory over `num_measured` steps; a learner takes each as soon as it is complete.

    As many groups as are in flight are trained before these steps, and as many after them.
    """
    num_steps = STEPS_IN_FLIGHT + num_measured + STEPS_IN_FLIGHT
    prompts_per_step = num_in_flight // STEPS_IN_FLIGHT
    gate = StalenessGate(
        prompts_per_step=prompts_per_step,
        max_staleness=MAX_STALENESS,
        max_concurrent=num_in_flight,
        total_steps=num_steps,
    )
    dispatcher = RolloutDispatcher(
        prompts=prompts,
        gate=gate,
        rollouts=roles.rollouts,
        rewards=roles.rewards,
        replay=roles.replay,
        settings=SamplingSettings(NUM_SIBLINGS, 1.0, NUM_TOKENS, seed=0),
        admission_filter=KEEP_ALL,
    )
    seconds = []  # of CPU, at the end of each step
    async with dispatcher.streaming():
        for version in range(1, num_steps + 1):
            groups = await roles.replay.take(prompts_per_step)
            dispatcher.advance(version)
            await roles.replay.release(groups)
            await roles.replay.stats()
            seconds.append(time.process_time())
    cpu_s = seconds[-1 - STEPS_IN_FLIGHT] - seconds[STEPS_IN_FLIGHT - 1]
    return 1000 * cpu_s / (num_measured * prompts_per_step * NUM_SIBLINGS)


class _SleepingEngines:
    """Any number of engines in this process: they answer after a while with nothing but a summary."""

    def __init__(self, mean_s: float) -> None:
        self._mean_s = mean_s

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        await asyncio.sleep(_sleep_s(prompt, self._mean_s))
        return Generated(prompt.prompt_id, _summary(prompt))


class _Engine(PromptServer):
    """A rollout actor without an engine: its groups are there after a while."""

    def __init__(self) -> None:
        super().__init__()
        self._group = make_group(Load("group", num_groups=1, num_tokens=NUM_TOKENS, num_trips=1))
        self._responses = self._group.small_responses()
        self._mean_s = 0.0

    async def start(self) -> None: ...

    async def ping(self) -> int:
        return 0

    async def pace(self, mean_s: float) -> None:
        """From now on a group takes so many seconds in the mean."""
        self._mean_s = mean_s

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        await asyncio.sleep(_sleep_s(prompt, self._mean_s))
        return replace(self._group, prompt=prompt), (_summary(prompt), self._responses)

    async def close(self) -> None: ...


class _Scorers:
    """Any number of reward workers in one process."""

    async def score(self, questions: Sequence[Question]) -> list[GroupOutcomes]:
        await asyncio.sleep(REWARD_S)
        ids = tuple(f"#{sibling}" for sibling in range(NUM_SIBLINGS))
        return [GroupOutcomes("default", ids, ({"accuracy": Score(0.0)},) * NUM_SIBLINGS)] * len(questions)


def _rollout_pool(engines: Sequence[ray.actor.ActorHandle]) -> RolloutPool:
    """The engines as a run's driver sees them; groups stay where they are and the driver holds references."""
    in_flight_requests = InFlightRequests(NUM_TOKENS)
    calls = ("start_s", "rollout_s", "sync_s", "sign_s", "probe_s", "stop_s")

    async def spawn(index: int) -> RolloutClient:
        return RolloutClient(
            engines[index], f"rollout/{index}", in_flight_requests=in_flight_requests, **dict.fromkeys(calls, TIMEOUT_S)
        )

    return RolloutPool(
        spawn,
        len(engines),
        release=_NoHosts().release,
        policy=NO_RESTARTS,
        health=HealthChecks(
            interval_s=TIMEOUT_S, probe_interval_s=TIMEOUT_S, max_failures_in_a_row=1, no_worker_s=TIMEOUT_S
        ),
        on_lost=lambda kind: None,
    )


def _reward_pool(handle: ray.actor.ActorHandle, config: RunConfig) -> RewardPool:
    losses = LossCounter()
    settings = ServiceSettings(
        start_s=TIMEOUT_S,
        alive_s=TIMEOUT_S,
        timeout_s=TIMEOUT_S,
        max_batch=config.rewards.pool.max_batch_groups,
        max_in_flight=max(IN_FLIGHT) // 8,
        max_queued=max(IN_FLIGHT),
        max_attempts=1,
    )
    service = RewardService(
        SHARED_SERVICE,
        [handle] * 8,
        hosts=_NoHosts(),
        restarts=NO_RESTARTS,
        settings=settings,
        on_lost=losses.count_loss,
    )
    recipe = Recipe(components=("accuracy",), weights={}, gates=(), normalise=False)
    rewards = config.rewards.model_copy(update={"recipes": {"default": recipe}})
    return RewardPool(rewards, {SHARED_SERVICE: service}, losses)


class _NoHosts:
    """A worker that is lost ends the benchmark: nothing is started again."""

    async def start(self, index: int) -> Any:
        raise WorkerDiedError(f"reward/{index} was lost: see the log above")

    async def stop(self, index: int, handle: Any) -> None: ...

    async def release(self, index: int) -> None: ...


def _sleep_s(prompt: Prompt, mean_s: float) -> float:
    return random.Random(prompt.prompt_id).expovariate(1 / mean_s)


def _summary(prompt: Prompt) -> GroupSummary:
    newest = 2**31  # whatever is published meanwhile: nothing here is too old
    return summary_of(prompt, {newest: NUM_SIBLINGS * NUM_TOKENS}, [NUM_TOKENS] * NUM_SIBLINGS, 2 * NUM_TOKENS)


def _findings(found: Mapping[str, tuple[float, ...]]) -> Findings:
    what = {
        "process": "dispatcher, gate, order and buffer; the rest faked in the driver's process",
        "ray": "the same with engines and rewards behind Ray, groups in the object store",
    }
    series = {
        f"{name}_{num}": Measurements(f"{what[name]}; {num} groups in flight", UNIT, found[f"{name}_{num}"])
        for name in what
        for num in IN_FLIGHT
    }
    claims = []
    for name in what:
        medians = [series[f"{name}_{num}"].median for num in IN_FLIGHT]
        claims.append(Claim(f"{name}: CPU ms a trajectory, the worst", max(medians), MAX_MS, at_least=False))
        growth = medians[-1] / medians[0]
        claims.append(Claim(f"{name}: {IN_FLIGHT[-1]} in flight / {IN_FLIGHT[0]}", growth, FLAT, at_least=False))
    settings = {
        "trajectories_in_a_group": NUM_SIBLINGS,
        "tokens_of_a_trajectory": NUM_TOKENS,
        "steps_in_flight": STEPS_IN_FLIGHT,
        "max_staleness": MAX_STALENESS,
        "groups_in_one_measurement": NUM_GROUPS,
        "groups_per_s": GROUPS_PER_S,
        "engines": NUM_ENGINES,
    }
    return Findings(settings, series, tuple(claims))
