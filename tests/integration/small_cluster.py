"""A whole run on real Ray whose roles compute next to nothing: real processes, pushes, deadlines and deaths."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
import torch
from fakes import FakeMetrics, FakePrompts
from sabotage import Saboteur
from small_roles import TRANSFER_S, SmallLearner, SmallReward, SmallRollout

from actors.reference_pool import NullReference
from actors.rollout_client import RolloutClient
from cluster.checkpoints import Checkpoints, CheckpointSchedule, newest_learner_state
from cluster.controller import Controller
from cluster.fleet import HealthChecks, RolloutFleet
from cluster.ray_group import HEALTH, _hosted, answer, stop
from cluster.replay_buffer import ReplayBuffer
from cluster.replay_client import ReplayClient
from cluster.restarts import RestartBudget, RestartPolicy
from cluster.restoring import RestoringLearner
from cluster.roles import SamplingSettings
from cluster.rollout_stream import AdmissionFilter, RetryingRollouts, RolloutStream
from cluster.staleness import StalenessGate
from cluster.status import WorkerState
from cluster.supervision import Supervisor, Watched
from cluster.weight_sync.publish import WeightSync
from configs.load import load_config
from configs.schema.run import Resume
from learner.learner_group import LearnerGroup
from rewards.pool import RewardPool

BUCKET_BYTES = 64
TIMEOUTS = ("start_s=90", "rollout_s=6", "reward_s=6", "update_s=10", "checkpoint_s=20", "object_s=10", "stop_s=1")
CONFIG = load_config([f"timeouts.{word}" for word in TIMEOUTS])
PROMPTS_PER_STEP = 3
CHECKPOINT_INTERVAL = 3


def start(role: type, name: str, *args: Any, max_concurrency: int = 1) -> Any:
    """The role in an actor of its own that books nothing."""
    actor = ray.remote(concurrency_groups={HEALTH: 1})(_hosted(role, name))
    options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": max_concurrency}
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return actor.options(runtime_env={"env_vars": env}, **options).remote((), *args)


class RewardHosts:
    """Starts and ends reward workers; they book nothing."""

    def __init__(self, spawn: Callable[[int], Any]) -> None:
        self._spawn = spawn

    async def start(self, index: int) -> Any:
        return self._spawn(index)

    async def stop(self, index: int, handle: Any) -> None:
        await stop(handle, timeout_s=1, what=f"reward/{index}")

    async def release(self, index: int) -> None: ...


class Visitor:
    """Looks at each version where an evaluation would; the loop waits for it."""

    def __init__(self, visit: Callable[[int], Awaitable[None]]) -> None:
        self._visit = visit

    async def maybe_run(self, version: int) -> None:
        await self._visit(version)


class SmallRun:
    """The real loop over small roles. Make another on the same folder to resume."""

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        num_engines: int = 2,
        max_staleness: int = 0,
        wave_size: int = 0,
        token_s: float = 0.01,
        on_version: Callable[[int], Awaitable[None]],
    ) -> None:
        self.folder = folder
        self.losses: Counter[str] = Counter()
        self.saboteur = Saboteur(folder)
        self._total_steps = total_steps
        self._num_engines = num_engines
        self._max_staleness = max_staleness
        self._wave_size = wave_size
        self._token_s = token_s
        self._on_version = on_version

    @property
    def is_whole(self) -> bool:
        """Whether every engine and every reward worker serves."""
        workers = [*self.fleet.status(), *self.pool.status()]
        return all(worker.state is WorkerState.SERVING for worker in workers)

    @property
    def trained(self) -> list[list[str]]:
        """Group ids of each step, as the final checkpoint holds them."""
        newest = newest_learner_state(self.folder / "checkpoints")
        assert newest is not None
        return torch.load(newest[1] / "rank0.pt")["trained"]

    async def go(self) -> int:
        """Run to the end; everything is stopped afterwards."""
        policy = RestartPolicy(max_restarts=50, window_s=600, backoff_s=0.05, max_backoff_s=0.5)
        fleet = self.fleet = RolloutFleet(
            self._spawn_engine,
            self._num_engines,
            release=_forget,
            policy=policy,
            health=HealthChecks(interval_s=0.5, probe_interval_s=5, max_failures_in_a_row=3, no_worker_s=90),
            on_lost=self._lost,
        )
        ranks = LearnerGroup(self._spawn_ranks, CONFIG.timeouts)
        learner = RestoringLearner(
            ranks,
            newest=lambda: newest_learner_state(self.folder / "checkpoints"),
            budget=RestartBudget(policy),
            on_lost=self._lost,
        )
        pool = self.pool = RewardPool(
            [self._spawn_reward(index) for index in range(2)],
            hosts=RewardHosts(self._spawn_reward),
            restarts=policy,
            start_s=90,
            alive_s=1,
            timeout_s=8,
            max_in_flight=4,
            max_attempts=5,
            on_failure="stop",
        )
        replay = start(ReplayBuffer, "replay/0", max_concurrency=16)
        client = ReplayClient(replay, call_s=10, take_s=120, reserve_s=30)
        try:
            await asyncio.gather(ranks.start(), fleet.start())
            controller = self._controller(fleet, ranks, learner, pool, client)
            return await controller.run()
        finally:
            self.losses.update({f"reward_{kind}": num for kind, num in pool.failures.items() if num})
            for handle in (*ranks.workers, replay):
                await stop(handle, timeout_s=2, what="a role")
            await fleet.close()
            await pool.close()

    def _controller(
        self, fleet: RolloutFleet, ranks: LearnerGroup, learner: RestoringLearner, pool: RewardPool, replay: ReplayClient
    ) -> Controller:
        gate = StalenessGate(
            prompts_per_step=PROMPTS_PER_STEP,
            max_staleness=self._max_staleness,
            max_concurrent=16,
            total_steps=self._total_steps,
        )
        stream = RolloutStream(
            prompts=FakePrompts(),
            gate=gate,
            rollouts=RetryingRollouts(fleet, max_retries=10, on_retry=lambda kind: None),
            rewards=pool,
            replay=replay,
            settings=SamplingSettings(2, 1.0, 3, 7),
            admission_filter=AdmissionFilter(min_scored=2, drop_uniform=False, max_rejected_in_a_row=100),
        )
        weights = WeightSync(
            learner,
            fleet,
            bucket_bytes=BUCKET_BYTES,
            wave_size=self._wave_size,
            max_attempts=6,
            canary_interval=1,
            canary_tolerance=1e-6,
            probe=FakePrompts().next(),
        )
        fleet.admit_with(weights.admit)

        async def published(push: Any) -> None:
            stream.advance(push.version)

        weights.on_published(published)
        checkpoints = Checkpoints(
            self.folder / "checkpoints",
            learner=learner,
            parts={"stream": stream},
            prepare=_nothing,
            finish=_nothing,
            identity={},
            resume=Resume.AUTO,
            schedule=CheckpointSchedule(CHECKPOINT_INTERVAL, self._total_steps, 2),
        )
        watched = [self._watched_rank(ranks, index, learner) for index in range(2)]
        watched.append(Watched("reward", pool.check, _nothing))
        return Controller(
            total_steps=self._total_steps,
            groups_per_step=PROMPTS_PER_STEP,
            checkpoints=checkpoints,
            weights=weights,
            supervisor=Supervisor(watched, [fleet], interval_s=0.5, deadline_s=2),
            rollouts=stream,
            replay=replay,
            reference=NullReference(),
            learner=learner,
            evaluator=Visitor(self._on_version),
            metrics=FakeMetrics(),
        )

    def _watched_rank(self, ranks: LearnerGroup, index: int, learner: RestoringLearner) -> Watched:
        async def ping() -> None:
            asked = ranks.workers[index]
            try:
                await answer(asked.is_alive.remote(), timeout_s=2, what=f"learner/{index} to say that it lives")
            except Exception:
                if ranks.workers[index] is asked:
                    raise

        return Watched(f"learner/{index}", ping, _nothing, learner.lose)

    async def _spawn_engine(self, index: int) -> RolloutClient:
        name = f"rollout/{index}"
        handle = start(SmallRollout, name, name, self.folder, self._token_s, max_concurrency=32)
        deadlines = {"start_s": 90, "rollout_s": 6, "sync_s": 2 * TRANSFER_S, "sign_s": 2, "probe_s": 4, "stop_s": 1}
        return RolloutClient(handle, name, **deadlines)

    def _spawn_ranks(self) -> list[Any]:
        return [start(SmallLearner, f"learner/{rank}", f"learner/{rank}", self.folder, rank, 2) for rank in range(2)]

    def _spawn_reward(self, index: int) -> Any:
        return start(SmallReward, f"reward/{index}", f"reward/{index}", self.folder)

    def _lost(self, kind: str) -> None:
        self.losses[kind] += 1


async def _nothing() -> None: ...


async def _forget(index: int) -> None: ...
