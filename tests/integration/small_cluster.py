"""A whole run on real Ray whose roles compute next to nothing: real processes, pushes, deadlines and deaths."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from fakes import FakeEvaluator, FakeHosts, FakeMetrics, FakePrompts, stop_request
from reward_data import component, pool_over, rewards_of
from sabotage import Saboteur
from small_roles import TRANSFER_S, SmallLearner, SmallRollout
from small_workers import OBJECT_S, SmallReward, SmallScorer

from mobula.actors.reference.pool import ReferencePool
from mobula.actors.rollout.client import RolloutClient
from mobula.cluster.controller import Controller
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.recovery.checkpoints import Checkpoints, CheckpointSchedule, newest_learner_state
from mobula.cluster.recovery.lost_ranks import RestoredRanks
from mobula.cluster.recovery.resume import JournalRecovery
from mobula.cluster.recovery.step_learner import GroupRegenerator, RegeneratingReference, StepLearner
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal
from mobula.cluster.replay.journal_writer import JournalWriter
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import AdmissionFilter, RetryingRollouts, RolloutDispatcher
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.rollout.staleness import AgeLimit, StalenessGate
from mobula.cluster.runtime.ray_actors import BACKGROUND, HEALTH, Seat, _hosted, answer, stop
from mobula.cluster.weight_sync.tolerance import Tolerance
from mobula.cluster.weight_sync.weight_sync import WeightSync
from mobula.cluster.workers.status import RestartBudget, RestartPolicy, WorkerState, WorkerStatus
from mobula.cluster.workers.supervisor import Supervisor, Watched, watched_pool
from mobula.configs.load import load_config
from mobula.configs.schema.run import Resume
from mobula.learner.learner_group import LearnerGroup
from mobula.rewards.pool.reward_pool import RewardPool

BUCKET_BYTES = 64  # less than a tensor
TIMEOUTS = ("start_s=240", "rollout_s=6", "reward_s=6", "update_s=10", "checkpoint_s=20", "object_s=10", "stop_s=1")
CONFIG = load_config(["experiment=digits", "weight_sync.timeout_s=4", *(f"timeouts.{word}" for word in TIMEOUTS)])
PROMPTS_PER_STEP = 3
CHECKPOINT_INTERVAL = 3
STEPS_PER_ROUND = CHECKPOINT_INTERVAL + 1  # in which every moment of a run comes
NUM_RANKS = 2
START_S = 240.0  # where other tests run beside this one, a process takes long to start
SIGN_S = 2.0
POLICY = RestartPolicy(max_restarts=500, window_s=600, backoff_s=0.05, max_backoff_s=0.5)
Anywhere = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the run is like."""

    total_steps: int
    num_engines: int = 2
    num_rewards: int = 2
    num_scorers: int = 1
    max_staleness: int = 0
    wave_size: int = 0
    token_s: float = 0.01
    answer_bytes: int = 10
    checkpoint_interval: int = CHECKPOINT_INTERVAL
    options_of: Callable[[str], Anywhere] = lambda name: {}  # a worker's name -> Ray options of its next actor


def start(role: type, name: str, *args: Any, max_concurrency: int = 1, options: Anywhere, **settings: Any) -> Any:
    """The role in an actor of its own that books nothing."""
    actor = ray.remote(concurrency_groups={HEALTH: 1, BACKGROUND: 1})(_hosted(role, name))
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    bare = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": max_concurrency, "runtime_env": {"env_vars": env}}
    return actor.options(**bare, **options).remote(Seat((), 1, None), *args, **settings)


def start_ray(folder: str, store_bytes: int, **more: Any) -> None:
    """Two cores for this process, which share nothing with another cluster; sockets are below `folder`."""
    own = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address="local", object_store_memory=store_bytes, _temp_dir=folder, **own, **more)


class Hosts(FakeHosts):
    """Starts and ends the workers of a pool; they book nothing."""

    async def stop(self, index: int, handle: Any) -> None:
        await stop(handle, timeout_s=1, what=f"worker {index}")


def lasting_pool(spawn: Callable[[int], Awaitable[RolloutClient]]) -> RolloutPool:
    """Two engines; one that is lost does not come back while a test runs."""
    policy = RestartPolicy(max_restarts=5, window_s=600, backoff_s=60, max_backoff_s=60)
    health = HealthChecks(interval_s=60, probe_interval_s=60, max_failures_in_a_row=3, no_worker_s=90)
    return RolloutPool(spawn, 2, release=_forget, policy=policy, health=health, on_lost=lambda kind: None)


class Visitor(FakeEvaluator):
    """The loop waits until its function has looked at a version."""

    async def maybe_run(self, version: int) -> None:
        await self._due(version)


class SmallRun:
    """The real loop over small roles. Make another on the same folder to resume."""

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        *,
        on_version: Callable[[int], Awaitable[None]] = lambda version: _nothing(),
        metrics: Metrics | FakeMetrics | None = None,
    ) -> None:
        self.folder = folder
        self.shape = shape
        self.losses: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.saboteur = Saboteur(folder)
        self.recovered: dict[str, int] = {}
        self.in_flight_requests = InFlightRequests(64)
        self.stop = stop_request(deadline_s=60)
        self._on_version = on_version
        self._metrics = metrics or FakeMetrics()

    @property
    def workers(self) -> list[WorkerStatus]:
        pools = (self.rollout_pool, self.rewards.services["reward"].pool, self.reference.pool)
        return [worker for pool in pools for worker in pool.status()]

    @property
    def is_whole(self) -> bool:
        """Whether every worker serves and runs, also those that are restored together with others."""
        singles = [f"learner/{rank}" for rank in range(NUM_RANKS)]
        names = [*singles, *(worker.name for worker in self.workers)]
        return all(w.state is WorkerState.SERVING for w in self.workers) and all(map(self.saboteur.is_there, names))

    @property
    def trained(self) -> list[list[str]]:
        """Group ids of each step, as the final checkpoint holds them."""
        _, folder = newest_learner_state(self.folder / "checkpoints")
        return torch.load(folder / "rank0.pt")["trained"]

    async def go(self) -> int:
        """Run to the end; everything is stopped afterwards."""
        self._start()
        try:
            await asyncio.gather(self._learner.start(), self.rollout_pool.start())
            return await self._controller().run()
        finally:
            self.losses.update({f"reward_{kind}": num for kind, num in self.rewards.failures.items() if num})
            self.losses.update({kind: num for kind, num in self.reference.losses.items() if num})
            closing = (self._learner, self.replay, self.rollout_pool, self.rewards, self.reference.pool)
            await asyncio.gather(*(role.close() for role in closing), return_exceptions=True)

    def _start(self) -> None:
        health = HealthChecks(interval_s=0.5, probe_interval_s=5, max_failures_in_a_row=3, no_worker_s=START_S)
        how = {"release": _forget, "policy": POLICY, "health": health, "on_lost": self._lost}
        self.rollout_pool = RolloutPool(self._spawn_engine, self.shape.num_engines, **how)
        self._learner = LearnerGroup(self._spawn_ranks, CONFIG.timeouts, ray.put)
        newest = partial(newest_learner_state, self.folder / "checkpoints")
        budget = RestartBudget(POLICY)
        self._learner.lost_ranks = RestoredRanks(self._learner, newest=newest, budget=budget, on_lost=self._lost)
        journal = JournalWriter(self._journal(), timeout_s=OBJECT_S)
        self.replay = ReplayBuffer(journal=journal, min_ready=PROMPTS_PER_STEP, room_s=30, take_s=120, close_s=2)
        self.rewards = self._reward_pool()
        self.reference = self._reference_pool()

    def _reward_pool(self) -> RewardPool:
        spawn = partial(self._spawn_worker, SmallReward, "reward")
        rewards = rewards_of(component("place", "exact_match"), on_failure="stop")
        workers = [spawn(index) for index in range(self.shape.num_rewards)]
        settings = {"start_s": START_S, "alive_s": 1, "timeout_s": 8, "max_in_flight": 4, "max_attempts": 5}
        return pool_over(rewards, workers, hosts=Hosts(spawn), restarts=POLICY, **settings)

    def _reference_pool(self) -> ReferencePool:
        spawn = partial(self._spawn_worker, SmallScorer, "reference")
        workers = [spawn(index) for index in range(self.shape.num_scorers)]
        settings = {"alive_s": 1, "timeout_s": START_S, "max_attempts": 5}
        return ReferencePool(workers, self.folder, hosts=Hosts(spawn), restarts=POLICY, **settings)

    def _controller(self) -> Controller:
        dispatcher = self._dispatcher()
        reference = RegeneratingReference(self.reference, self._regenerator(dispatcher))
        checkpoints, learner = self._records(dispatcher, reference)
        watched = [self._watched_rank(index) for index in range(NUM_RANKS)]
        watched += [watched_pool("reward", self.rewards.check, _nothing)]
        watched += [watched_pool("reference", self.reference.pool.check, _nothing)]
        return Controller(
            total_steps=self.shape.total_steps,
            groups_per_step=PROMPTS_PER_STEP,
            checkpoints=checkpoints,
            weights=self._weights(dispatcher),
            supervisor=Supervisor(watched, [self.rollout_pool], interval_s=0.5, deadline_s=SIGN_S),
            rollouts=dispatcher,
            replay=self.replay,
            reference=reference,
            learner=learner,
            evaluator=Visitor(self._on_version),
            metrics=self._metrics,
            stop=self.stop,
        )

    def _dispatcher(self) -> RolloutDispatcher:
        gate = StalenessGate(
            prompts_per_step=PROMPTS_PER_STEP,
            max_staleness=self.shape.max_staleness,
            max_concurrent=16,
            total_steps=self.shape.total_steps,
        )
        self.prompts = FakePrompts(epoch_size=1_000_000)
        rollouts = RetryingRollouts(self.rollout_pool, self.in_flight_requests, max_retries=20, on_retry=self._retried)
        return RolloutDispatcher(
            prompts=self.prompts,
            gate=gate,
            rollouts=rollouts,
            rewards=self.rewards,
            replay=self.replay,
            settings=SamplingSettings(2, 1.0, 3, 7),
            admission_filter=AdmissionFilter(min_scored=2, drop_uniform=False, max_rejected_in_a_row=100),
        )

    def _regenerator(self, dispatcher: RolloutDispatcher) -> GroupRegenerator:
        groups, on_lost = LiveGroups(self.prompts, ray.put), lambda kind: self._lost(f"group_{kind}")
        again = dispatcher.sample_again
        regenerator = GroupRegenerator(self.replay, groups, again, timeout_s=OBJECT_S, on_lost=on_lost)
        self._learner.lost_ranks.recall = regenerator.recall
        return regenerator

    def _records(
        self, dispatcher: RolloutDispatcher, reference: RegeneratingReference
    ) -> tuple[Checkpoints, StepLearner]:
        learner = StepLearner(self._learner, journal=self.replay, regenerate=reference.regenerate)
        recovery = JournalRecovery(
            self._journal(),
            learner=learner,
            groups=LiveGroups(self.prompts, ray.put),
            dispatcher=dispatcher,
            replay=self.replay,
            metrics=self._metrics,
            age_limit=AgeLimit(self.shape.max_staleness),
            on_recovered=self.recovered.update,
        )
        checkpoints = Checkpoints(
            self.folder / "checkpoints",
            learner=learner,
            parts={"stream": dispatcher},
            prepare=_nothing,
            finish=_nothing,
            identity={},
            resume_mode=Resume.AUTO,
            schedule=CheckpointSchedule(self.shape.checkpoint_interval, self.shape.total_steps, 2),
            recovery=recovery,
        )
        return checkpoints, learner

    def _weights(self, dispatcher: RolloutDispatcher) -> WeightSync:
        canary = {"canary_interval": 1, "canary_tolerance": Tolerance(1e-6, 0.0), "probe": FakePrompts().next()}
        how = {"bucket_bytes": BUCKET_BYTES, "wave_size": self.shape.wave_size, "max_attempts": 6}
        weights = WeightSync(self._learner, self.rollout_pool, **how, **canary)
        self.rollout_pool.admit_with(weights.admit)
        weights.on_announced.append(dispatcher.advance)
        return weights

    def _watched_rank(self, index: int) -> Watched:
        async def ping() -> None:
            asked = self._learner.workers[index]
            try:
                what = f"learner/{index} to answer that it is alive"
                await answer(asked.is_alive.remote(), timeout_s=SIGN_S, what=what)
            except Exception:
                if self._learner.workers[index] is asked:
                    raise

        return Watched(f"learner/{index}", ping, _nothing, self._learner.lost_ranks.lose)

    def _spawn(self, role: type, name: str, *args: Any, max_concurrency: int = 1, **settings: Any) -> Any:
        options = self.shape.options_of(name)
        return start(role, name, name, self.folder, *args, max_concurrency=max_concurrency, options=options, **settings)

    def _spawn_worker(self, role: type, role_name: str, index: int) -> Any:
        return self._spawn(role, f"{role_name}/{index}")

    async def _spawn_engine(self, index: int) -> RolloutClient:
        name = f"rollout/{index}"
        handle = self._spawn(SmallRollout, name, self.shape.token_s, self.shape.answer_bytes, max_concurrency=32)
        deadlines = {"start_s": START_S, "rollout_s": 6, "sync_s": 2 * TRANSFER_S}
        deadlines |= {"sign_s": 2, "probe_s": 4, "stop_s": 1}
        return RolloutClient(handle, name, in_flight_requests=self.in_flight_requests, **deadlines)

    def _spawn_ranks(self) -> list[Any]:
        return [self._spawn(SmallLearner, f"learner/{rank}", rank, NUM_RANKS) for rank in range(NUM_RANKS)]

    def _journal(self) -> Journal:
        return Journal(self.folder / "journal", {})

    def _lost(self, kind: str) -> None:
        self.losses[kind] += 1

    def _retried(self, kind: str) -> None:
        self.retries[kind] += 1


async def _nothing() -> None: ...


async def _forget(index: int) -> None: ...
