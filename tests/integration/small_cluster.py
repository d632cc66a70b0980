"""A whole run on real Ray whose roles compute next to nothing: real processes, pushes, deadlines and deaths.

The policy is one number: what a sum over the ids of all trained groups makes of it. So two runs that trained the same
groups in the same order have the same weights, and an engine that got another version's bytes is found out.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from fakes import FakeEvaluator, FakeMetrics, FakePrompts, FakeReference, make_group
from sabotage import Saboteur

from actors.rollout_client import RolloutClient
from cluster.checkpoints import Checkpoints, CheckpointSchedule, newest_learner_state
from cluster.controller import Controller
from cluster.fleet import HealthChecks, RolloutFleet
from cluster.ray_group import HEALTH, _hosted, answer, stop
from cluster.replay_buffer import ReplayBuffer
from cluster.replay_client import ReplayClient
from cluster.restarts import RestartBudget, RestartPolicy
from cluster.restoring import RestoringLearner
from cluster.roles import SamplingSettings, UpdateReport
from cluster.rollout_stream import AdmissionFilter, RetryingRollouts, RolloutStream
from cluster.staleness import StalenessGate
from cluster.supervision import Supervisor, Watched
from cluster.trajectory import GroupSummary, Prompt, Reward, ScoredGroup, TrajectoryGroup
from cluster.weight_sync.manifest import Bucket, Manifest, TensorSpec
from cluster.weight_sync.publish import WeightSync
from cluster.weight_sync.transport import Rendezvous, TransferGroup, unpack
from configs.load import load_config
from configs.schema.run import Resume
from learner.learner_group import LearnerGroup
from learner.process_group import RankRendezvous
from learner.weight_publisher import WeightPublisher
from rewards.pool import RewardPool
from rewards.worker import GroupScore

MANIFEST = Manifest((TensorSpec("w", (1,), "float32"),))
BUCKET_BYTES = 64
PRIME = 1_000_003  # keeps the policy a whole number that float32 holds exactly
TRANSFER_S = 5.0
TIMEOUTS = ("start_s=90", "rollout_s=6", "reward_s=6", "update_s=10", "checkpoint_s=20", "object_s=10", "stop_s=1")
CONFIG = load_config([f"timeouts.{word}" for word in TIMEOUTS])
PROMPTS_PER_STEP = 3
CHECKPOINT_INTERVAL = 3


class SmallRollout:
    """An engine that samples three tokens, one every `token_s`, and really takes part in broadcasts."""

    def __init__(self, name: str, folder: Path, token_s: float) -> None:
        self._saboteur = Saboteur(folder)
        self._saboteur.enlist(name)
        self._token_s = token_s
        self._weight = float("nan")
        self._version = -1

    async def start(self) -> None: ...

    async def ping(self) -> int:
        return self._version

    async def probe(self) -> None: ...

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> tuple[TrajectoryGroup, GroupSummary]:
        versions = []
        for _ in range(3):
            await asyncio.sleep(self._token_s)
            versions.append(self._version)
        self._saboteur.moment("generating")
        group = make_group(prompt, versions)
        return group, group.summary()

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return np.full(3, -self._weight)

    async def check_manifest(self, manifest: Manifest) -> None:
        manifest.check_against(MANIFEST)

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        self._group = await asyncio.to_thread(TransferGroup, rendezvous, rank, torch.device("cpu"))

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> None:
        await asyncio.to_thread(self._receive, manifest, bucket_bytes)
        self._version = version

    async def load_weights(
        self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[np.ndarray], version: int
    ) -> None:
        for bucket, data in zip(manifest.buckets(bucket_bytes), buckets, strict=True):
            self._take(bucket, torch.from_numpy(data.copy()))
        self._version = version

    async def close(self) -> None: ...

    def _receive(self, manifest: Manifest, bucket_bytes: int) -> None:
        self._saboteur.moment("in_broadcast")
        for bucket in manifest.buckets(bucket_bytes):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            self._group.broadcast(buffer, "the weight")
            self._take(bucket, buffer)

    def _take(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        [(_, tensor)] = unpack(bucket, buffer)
        self._weight = float(tensor[0])


class SmallLearner:
    """One of two ranks that meet over gloo in every update."""

    def __init__(self, name: str, folder: Path, rank: int, world_size: int) -> None:
        self._saboteur = Saboteur(folder)
        self._saboteur.enlist(name)
        self._rank, self._world_size = rank, world_size
        self._rendezvous = RankRendezvous()
        self._state: dict[str, Any] = {"version": 0, "weight": 0, "trained": []}

    def rendezvous_address(self) -> str:
        return self._rendezvous.address(TRANSFER_S)

    def connect(self, address: str) -> None:
        self._rendezvous.join(
            address, rank=self._rank, world_size=self._world_size, backend="gloo", timeout_s=TRANSFER_S
        )
        self._publisher = WeightPublisher(
            MANIFEST,
            lambda: iter([("w", torch.tensor([float(self._state["weight"])]))]),
            rank=self._rank,
            device=torch.device("cpu"),
            transport="gloo",
            timeout_s=TRANSFER_S,
        )

    def update(self, groups: Sequence[ScoredGroup], version: int) -> UpdateReport:
        if self._rank == 0:
            self._saboteur.moment("in_update")
        dist.all_reduce(torch.ones(1))
        ids = [group.summary.group_id for group in groups]
        for group_id in ids:
            digest = int.from_bytes(hashlib.sha256(group_id.encode()).digest()[:4], "big")
            self._state["weight"] = (self._state["weight"] * 31 + digest) % PRIME
        self._state["trained"] += [ids]
        self._state["version"] = version
        return UpdateReport(version, {"loss": 0.0})

    def sequence_logprobs(self, prompt: Prompt) -> np.ndarray:
        return np.full(3, -float(self._state["weight"]))

    def manifest(self) -> Manifest:
        return MANIFEST

    def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return self._publisher.open_transfer(epoch, num_receivers)

    def join_transfer(self, rendezvous: Rendezvous) -> None:
        self._publisher.join_transfer(rendezvous)

    def leave_transfer(self, epoch: int) -> None:
        self._publisher.leave_transfer(epoch)

    def send_weights(self, bucket_bytes: int, epoch: int) -> None:
        if self._rank == 0:
            self._saboteur.moment("sending")
        self._publisher.send(bucket_bytes, epoch)

    def export_weights(self, bucket_bytes: int) -> tuple[int, list[np.ndarray]]:
        return self._state["version"], self._publisher.export(bucket_bytes)

    def save(self, folder: Path) -> None:
        if self._rank == 0:
            self._saboteur.moment("in_checkpoint")
        torch.save(self._state, folder / f"rank{self._rank}.pt")

    def load(self, folder: Path) -> int:
        self._state = torch.load(folder / f"rank{self._rank}.pt")
        return self._state["version"]

    def close(self) -> None:
        self._publisher.close()
        dist.destroy_process_group()


class SmallReward:
    """Gives the siblings of a group different rewards."""

    def __init__(self, name: str, folder: Path) -> None:
        self._saboteur = Saboteur(folder)
        self._saboteur.enlist(name)

    def score(self, groups: Sequence[Any]) -> list[GroupScore]:
        self._saboteur.moment("scoring")
        found = ray.get(list(groups), timeout=10)
        return [GroupScore(tuple(Reward(float(i)) for i, _ in enumerate(g.trajectories)), ()) for g in found]

    def close(self) -> None: ...


def start(role: type, name: str, *args: Any, max_concurrency: int = 1) -> Any:
    """The role in an actor of its own that books nothing."""
    actor = ray.remote(concurrency_groups={HEALTH: 1})(_hosted(role, name))
    options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": max_concurrency}
    return actor.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}, **options).remote((), *args)


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
        on_version: Any = lambda version: None,
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
        rewards = [self._spawn_reward(index) for index in range(2)]
        pool = RewardPool(
            rewards, respawn=self._respawn_reward, timeout_s=8, max_in_flight=4, max_attempts=5, on_failure="stop"
        )
        replay = start(ReplayBuffer, "replay/0", max_concurrency=16)
        client = ReplayClient(replay, call_s=10, take_s=120)
        try:
            await asyncio.gather(ranks.start(), fleet.start())
            controller = self._controller(fleet, ranks, learner, pool, client)
            return await controller.run()
        finally:
            for handle in (*ranks.workers, *pool.workers, replay):
                await stop(handle, timeout_s=2, what="a role")
            await fleet.close()

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
        return Controller(
            total_steps=self._total_steps,
            groups_per_step=PROMPTS_PER_STEP,
            checkpoints=checkpoints,
            weights=weights,
            supervisor=Supervisor(watched, [fleet], interval_s=0.5, deadline_s=2),
            rollouts=stream,
            replay=replay,
            reference=FakeReference(),
            learner=learner,
            evaluator=FakeEvaluator(self._on_version),
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

    async def _respawn_reward(self, index: int, lost: Any) -> Any:
        await stop(lost, timeout_s=1, what=f"reward/{index}")
        self._lost("reward")
        return self._spawn_reward(index)

    def _lost(self, kind: str) -> None:
        self.losses[kind] += 1


async def _nothing() -> None: ...
