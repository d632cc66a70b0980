"""SimulatedRoles: roles of a run on the planned nodes, with actors that wait instead of computing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mobula.actors.reference.pool import NullReference, ReferencePool
from mobula.cluster.errors import PlacementError, WorkerDiedError
from mobula.cluster.records.trajectory import GroupSummary, Prompt, ScoredGroup
from mobula.cluster.recovery.lost_ranks import NotRestartableError
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import RolloutPool
from mobula.cluster.runtime.placement import NodeResources, PlacedWorker, PlacementPlan, plan_placement
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.cluster.workers.supervisor import watched_pool
from mobula.configs.schema import ResourcesConfig, RunConfig, WorkerResources
from mobula.configs.schema.rewards import RewardsConfig
from mobula.deploy.rehearsal.simulated.engine import Decoder, DecodeSpeed, Observed, SimulatedEngine, SimulatedGroup
from mobula.deploy.rehearsal.simulated.machine import Cores, ResponseLengths
from mobula.deploy.rehearsal.speeds import Speeds
from mobula.deploy.wiring.persistence import replay_buffer
from mobula.deploy.wiring.roles import (
    Inference,
    Training,
    alive_s,
    health_checks,
    restart_policy,
    restored_ranks,
    reward_role,
    service_settings,
    watched_reference,
)
from mobula.learner.examples import Planners
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.policies.adapters import adapter_manifest
from mobula.learner.shares import Portion, planner_of
from mobula.rewards.components import RecipeBook
from mobula.rewards.contract import Score
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool, RewardService
from mobula.rewards.pool.worker import GroupOutcomes, Question


class SimulatedReply:
    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def future(self) -> Future[Any]:
        return self._result


class _Method:
    """A method of a simulated actor; `remote` begins a call and returns at once."""

    def __init__(self, handle: Handle, call: Callable[..., Coroutine[Any, Any, Any]], num_returns: int = 1) -> None:
        self._handle = handle
        self._call = call
        self._num_returns = num_returns

    def options(self, *, num_returns: int = 1, concurrency_group: str = "") -> _Method:
        return _Method(self._handle, self._call, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        result: Future[Any] = Future()
        self._handle.begin(self._call(*args, **kwargs), result)
        return SimulatedReply(result) if self._num_returns == 1 else [SimulatedReply(result)] * self._num_returns


class Handle:
    """Stands for a Ray actor handle. Calls of a lost worker fail."""

    def __init__(self, worker: Any, name: str) -> None:
        self.name = name
        self._worker = worker
        self._calls: dict[Future[Any], asyncio.Task[None]] = {}
        self._death: Exception | None = None

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, getattr(self._worker, method))

    def begin(self, call: Coroutine[Any, Any, Any], result: Future[Any]) -> None:
        if self._death is not None:
            call.close()
            result.set_exception(self._death)
            return
        self._calls[result] = asyncio.create_task(self._run(call, result))

    def lose(self, error: WorkerDiedError) -> None:
        """Ends the process: calls in progress and later ones fail."""
        self._death = error
        calls, self._calls = self._calls, {}
        for result, task in calls.items():
            task.cancel()
            if not result.done():
                result.set_exception(error)

    async def _run(self, call: Coroutine[Any, Any, Any], result: Future[Any]) -> None:
        try:
            value = await call
        except Exception as error:
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(value)
        finally:
            self._calls.pop(result, None)


class SimulatedRanks:
    """What all learner ranks of a run share. The slowest rank of an update is the last one of all."""

    def __init__(
        self, speeds: Speeds, num_ranks: int, manifest: Manifest, cores: Cores, state_bytes: float = 0.0
    ) -> None:
        """`manifest`: the pushed tensors. `state_bytes`: the part of a checkpoint that one rank writes."""
        self.speeds = speeds
        self.num_ranks = num_ranks
        self.manifest = manifest
        self.cores = cores
        self.state_s = state_bytes / speeds.storage_bytes_per_s
        self.push_s = speeds.push_s + manifest.num_bytes / speeds.push_bytes_per_s
        self.slow_down: dict[int, float] = {}  # rank -> factor on its seconds
        self.disk_error: OSError | None = None  # of writes from now on
        self.busy_s = 0.0
        self.borrowed = 0  # references that all ranks have received
        self._updating: dict[int, asyncio.Task[float]] = {}  # by version

    async def update(self, groups: Sequence[ScoredGroup], version: int) -> None:
        """Waits for the step that makes `version`; one timer for all ranks."""
        if version not in self._updating:
            self._updating = {version: asyncio.create_task(self._compute(groups))}
        await asyncio.shield(self._updating[version])

    def forget(self) -> None:
        for task in self._updating.values():
            task.cancel()
        self._updating = {}

    async def _compute(self, groups: Sequence[ScoredGroup]) -> float:
        started_s = asyncio.get_running_loop().time()
        tokens = sum(map(row_tokens, (group.summary for group in groups))) / self.num_ranks
        sampled = sum(group.summary.num_tokens for group in groups) / self.num_ranks
        slowest = max(self.slow_down.values(), default=1.0)
        speeds = self.speeds
        fixed_s = speeds.update_s + (speeds.exchange_s if self.num_ranks > 1 else 0.0)
        seconds = slowest * (fixed_s + tokens / speeds.learner_tokens_per_s + sampled * speeds.learner_response_s)
        await self.cores.compute(seconds, num_threads=self.num_ranks)
        self.busy_s += asyncio.get_running_loop().time() - started_s
        return seconds


class SimulatedRank:
    """One learner rank: the calls of `mobula.learner.learner_group.LearnerGroup`."""

    def __init__(self, ranks: SimulatedRanks, index: int) -> None:
        self._ranks = ranks
        self._index = index
        self._version = 0

    async def rendezvous_address(self) -> str:
        return "rehearsal:1"

    async def connect(self, address: str) -> None:
        await asyncio.sleep(self._ranks.speeds.start_s)

    async def is_alive(self) -> Vitals:
        return Vitals("rehearsal", 0, None, None)

    async def begin_rl(self) -> None: ...

    async def export(self, folder: Path) -> None:
        await self._write()

    async def update(
        self, groups: Sequence[ScoredGroup], version: int, *, portion: Portion | None = None, **more: Any
    ) -> UpdateReport:
        pairs = [(g.group, g.reference_logprobs) for g in groups] if portion is None else portion.references.values()
        self._ranks.borrowed += sum(reference is not None for pair in pairs for reference in pair)
        await self._ranks.update(groups, version)
        self._version = version
        return UpdateReport(version, {} if self._index else _metrics(groups))

    async def manifest(self) -> Manifest:
        return self._ranks.manifest

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return Rendezvous("rehearsal", 1, epoch, 1 + num_receivers, "gloo", 60.0)

    async def join_transfer(self, rendezvous: Rendezvous) -> None: ...

    async def leave_transfer(self, epoch: int) -> None: ...

    async def send_weights(
        self, bucket_bytes: int, epoch: int, step: VersionStep | None = None
    ) -> PushedChanges | None:
        await self._ranks.cores.compute(self._ranks.push_s)
        return None if step is None else PushedChanges(0, 0)

    async def export_buckets(self, bucket_bytes: int) -> int:
        await self._ranks.cores.compute(self._ranks.push_s)
        return self._version

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        return np.zeros(max(0, prompt.num_tokens - 1), dtype=np.float32)

    async def save(self, folder: Path) -> None:
        (folder / f"rank-{self._index}").write_text(str(self._version))

    async def finish_save(self) -> None:
        await self._write()

    async def load(self, folder: Path) -> int:
        await asyncio.sleep(self._ranks.state_s)
        self._version = int((folder / "rank-0").read_text())
        return self._version

    async def offload(self, part: str) -> None: ...

    async def onload(self) -> None: ...

    async def close(self) -> None: ...

    async def _write(self) -> None:
        if self._ranks.disk_error is not None:
            raise self._ranks.disk_error
        await asyncio.sleep(self._ranks.state_s)


class SimulatedWorker:
    async def ping(self) -> bool:
        return True

    async def is_alive(self) -> Vitals:
        return Vitals("rehearsal", 0, None, None)

    async def close(self) -> None: ...


@dataclass
class SimulatedScorer(SimulatedWorker):
    load_s: float
    tokens_per_s: float
    response_s: float
    call_s: float
    cores: Cores
    busy_s: float = 0.0

    async def load(self, folder: Path) -> None:
        await asyncio.sleep(self.load_s)

    async def score(self, groups: Sequence[ScoredGroup]) -> None:
        started_s = asyncio.get_running_loop().time()
        tokens = sum(row_tokens(group.summary) for group in groups)
        sampled = sum(group.summary.num_tokens for group in groups)
        await self.cores.compute(self.call_s + tokens / self.tokens_per_s + sampled * self.response_s)
        self.busy_s += asyncio.get_running_loop().time() - started_s

    async def score_one(self, group: ScoredGroup) -> None:
        await self.score([group])


class SimulatedRewards(SimulatedWorker):
    """One reward worker of a service. A component's value is 0 or 1, drawn by prompt and sibling."""

    def __init__(self, rewards: RewardsConfig, service: str, group_s: float) -> None:
        self.busy_s = 0.0
        self._names = [component.name for component in rewards.components if component.service == service]
        self._book = RecipeBook(rewards)
        self._group_s = group_s
        self._lock = asyncio.Lock()  # one call at a time, as a RewardWorker

    async def score(self, questions: Sequence[Question]) -> list[GroupOutcomes]:
        async with self._lock:
            await asyncio.sleep(self._group_s * len(questions))
            self.busy_s += self._group_s * len(questions)
        return [self._outcomes(question.group) for question in questions]

    def _outcomes(self, group: SimulatedGroup) -> GroupOutcomes:
        label = self._book.label(group.prompt.metadata)
        recipe = self._book.find(label)
        names = [name for name in self._names if recipe is None or name in recipe.weights]
        draw = random.Random(group.prompt.prompt_id)
        outcomes = tuple({name: Score(float(draw.random() < 0.5)) for name in names} for _ in range(group.num_siblings))
        return GroupOutcomes(label, tuple(f"#{n}" for n in range(len(outcomes))), outcomes)


def row_tokens(summary: GroupSummary) -> int:
    """Tokens of all rows of a group: each response with its prompt."""
    return summary.num_tokens + summary.num_prompt_tokens * summary.num_trajectories


def _metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    num_tokens = sum(group.summary.num_tokens for group in groups)
    num_responses = sum(group.summary.num_trajectories for group in groups)
    return {
        "loss": 0.0,
        "num_tokens": float(num_tokens),
        "response_length": num_tokens / max(1, num_responses),
        "optimizer_steps": 1.0,
    }


OPTIMIZER_COPIES = 6  # bytes of a checkpoint over those of the bfloat16 weights: float32 weights and two moments
REFERENCE, LEARNER, ROLLOUT = "reference", "learner", "rollout"


@dataclass(frozen=True)
class Hardware:
    """What the simulated workers have: nodes, speeds and shared processors."""

    placement: PlacementPlan
    speeds: Speeds
    nodes: Sequence[NodeResources]
    cores: Cores
    num_slots: int  # responses that one engine decodes at a time
    manifest: Manifest  # of the real model
    driver_node: str


@dataclass(eq=False)
class SimulatedRoles:
    """Builds the parts of a run that `build_controller` connects. Create it in the event loop of the rehearsal."""

    config: RunConfig
    hardware: Hardware
    lengths: ResponseLengths
    observed: Observed
    on_lost: Callable[[str], None]

    def __post_init__(self) -> None:
        self.engines: dict[int, SimulatedEngine] = {}  # by index; a restarted engine replaces the lost one
        self.rank_handles: list[Handle] = []
        self.handles: dict[tuple[str, int], Handle] = {}  # (role, index) -> newest scorer or reward worker
        self.down: set[str] = set()  # nodes
        self.returning: set[str] = set()  # of them, those that come back
        self.slow: dict[str, float] = {}  # node -> factor on its seconds
        self.workers: dict[str, list[Any]] = {}  # role -> simulated scorers or reward workers
        self._placement = self.hardware.placement
        self._restored = asyncio.Event()
        hardware, num_ranks = self.hardware, len(self.places(LEARNER))
        state_bytes = OPTIMIZER_COPIES * hardware.manifest.num_bytes / max(1, num_ranks)
        self.ranks = SimulatedRanks(hardware.speeds, num_ranks, self._pushed(), hardware.cores, state_bytes)

    def places(self, role: str) -> Sequence[PlacedWorker]:
        return self._placement.of_role(role)

    def inference(self) -> Inference:
        rewards, in_flight = self._rewards(), InFlightRequests(self.config.sampler.chunk_tokens)
        return Inference(
            rollouts=self._rollouts(),
            in_flight_requests=in_flight,
            rewards=rewards,
            watched=(watched_pool("reward", rewards.check, rewards.close),),
        )

    def training(self) -> Training:
        config = self.config
        group, reference = _LearnerGroup(self), self._reference()
        ranks = [replace(rank, close=_nothing) for rank in restored_ranks(group, config, self.on_lost)]
        watched = (*ranks, *watched_reference(reference))
        return Training(group, reference, replay_buffer(config), watched, None)

    def node_of(self, role: str, index: int) -> str:
        return next(worker.node_id for worker in self.places(role) if worker.index == index)

    def lose(self, node_id: str, *, returns: bool) -> list[str]:
        """Ends every worker of a node and plans them on the free resources of the other nodes, role by role. A role
        that does not fit waits for the node. Returns the names of the lost workers."""
        self.down.add(node_id)
        self.returning |= {node_id} if returns else set()
        lost = [worker for worker in self._placement.workers if worker.node_id == node_id]
        self._move(lost)
        for engine in list(self.engines.values()):
            if engine.node_id == node_id:
                engine.lose(WorkerDiedError(f"{engine.name} died: {node_id} is gone"))
        for worker in lost:
            others = self.handles.get((worker.role, worker.index))
            handle = self.rank_handles[worker.index] if worker.role == LEARNER else others
            if handle is not None:
                handle.lose(WorkerDiedError(f"{worker.name} died: {node_id} is gone"))
        return [worker.name for worker in lost]

    def _move(self, lost: Sequence[PlacedWorker]) -> None:
        for role in dict.fromkeys(worker.role for worker in lost):
            own = [worker for worker in lost if worker.role == role]
            resources = self.config.resources
            workers = resources.roles[role].model_copy(update={"num_workers": len(own)})
            try:
                plan = plan_placement(with_role(resources, role, workers), self._free_nodes(), (role,))
            except PlacementError:
                continue
            places = zip(own, plan.of_role(role), strict=True)
            moved = {worker.index: replace(place, index=worker.index) for worker, place in places}
            self._placement = PlacementPlan(
                tuple(moved.get(w.index, w) if w.role == role else w for w in self._placement.workers)
            )

    def _free_nodes(self) -> list[NodeResources]:
        free = []
        for node in self.hardware.nodes:
            if node.node_id in self.down:
                continue
            own = [worker for worker in self._placement.workers if worker.node_id == node.node_id]
            free.append(
                replace(
                    node,
                    num_cpus=node.num_cpus - sum(worker.num_cpus for worker in own),
                    num_gpus=node.num_gpus - sum(worker.num_gpus for worker in own),
                    all_cpus=node.num_cores,
                )
            )
        return free

    def restore(self, node_id: str) -> None:
        self.down.discard(node_id)
        self.returning.discard(node_id)
        self._restored.set()
        self._restored = asyncio.Event()

    def slow_down(self, node_id: str, factor: float) -> None:
        self.slow[node_id] = factor
        for engine in self.engines.values():
            if engine.node_id == node_id:
                engine.decoder.settle()
                engine.decoder.slow_down = factor
                engine.decoder.replan()
        for worker in self.places(LEARNER):
            if worker.node_id == node_id:
                self.ranks.slow_down[worker.index] = factor

    async def compute_driver(self) -> None:
        await self.hardware.cores.compute(self.hardware.speeds.step_s)

    def busy_s(self) -> dict[str, float]:
        """Role -> seconds of work, summed over workers that are there and that were lost."""
        busy = {role: sum(worker.busy_s for worker in workers) for role, workers in self.workers.items()}
        return {ROLLOUT: self.observed.busy_s(), LEARNER: self.ranks.busy_s * self.ranks.num_ranks, **busy}

    async def all_up(self) -> None:
        while any(worker.node_id in self.down for worker in self.places(LEARNER)):
            await self._restored.wait()

    def _pushed(self) -> Manifest:
        manifest, payload = self.hardware.manifest, self.config.weight_sync.payload
        is_small = payload == "adapters"
        return adapter_manifest(manifest, self.config.policy) if is_small else replace(manifest, payload=payload)

    def start_ranks(self) -> list[Handle]:
        self.ranks.forget()
        self.rank_handles = [
            Handle(SimulatedRank(self.ranks, worker.index), worker.name) for worker in self.places(LEARNER)
        ]
        return self.rank_handles

    def _rollouts(self) -> RolloutPool:
        return RolloutPool(
            self._start_engine,
            len(self.places(ROLLOUT)),
            release=_release,
            policy=restart_policy(self.config),
            health=health_checks(self.config),
            on_lost=self.on_lost,
        )

    async def _start_engine(self, index: int) -> SimulatedEngine:
        node_id, speeds = self.node_of(ROLLOUT, index), self.hardware.speeds
        if node_id in self.down:
            raise PlacementError(f"{ROLLOUT}/{index} has no place: {node_id} is gone")
        speed = DecodeSpeed(
            speeds.decode_step_s, speeds.decode_sequence_s, speeds.prefill_tokens_per_s, speeds.engine_response_s
        )
        decoder = Decoder(speed, num_slots=self.hardware.num_slots, cores=self.hardware.cores)
        decoder.slow_down = self.slow.get(node_id, 1.0)
        engine = SimulatedEngine(
            f"{ROLLOUT}/{index}", node_id, decoder, self.lengths, speeds, self.ranks.push_s, self.observed
        )
        self.engines[index] = engine
        return engine

    def _reference(self) -> ReferencePool | NullReference:
        config, speeds = self.config, self.hardware.speeds
        if not (places := self.places(REFERENCE)):
            return NullReference()
        times = (speeds.start_s, speeds.reference_tokens_per_s, speeds.reference_response_s, speeds.reference_s)
        hosts = _Hosts(self, REFERENCE, partial(SimulatedScorer, *times, self.hardware.cores))
        return ReferencePool(
            [hosts.handle(worker.index) for worker in places],
            Path("reference"),
            hosts=hosts,
            restarts=restart_policy(config),
            alive_s=alive_s(config),
            timeout_s=config.timeouts.reference_s,
            max_attempts=config.max_rollout_retries + 1,
            on_lost=self.on_lost,
        )

    def _rewards(self) -> RewardPool:
        losses = LossCounter(self.on_lost)
        services = {name: self._reward_service(name, losses) for name in self.config.rewards.services}
        return RewardPool(self.config.rewards, services, losses)

    def _reward_service(self, name: str, losses: LossCounter) -> RewardService:
        config, role = self.config, reward_role(name)
        hosts = _Hosts(self, role, partial(SimulatedRewards, config.rewards, name, self.hardware.speeds.reward_s))
        return RewardService(
            role,
            [hosts.handle(worker.index) for worker in self.places(role)],
            hosts=hosts,
            restarts=restart_policy(config),
            settings=service_settings(config),
            on_lost=losses.count_loss,
        )


class _LearnerGroup(LearnerGroup):
    """A learner group whose ranks are no Ray actors."""

    def __init__(self, roles: SimulatedRoles) -> None:
        config = roles.config
        planners = Planners(planner_of(config))
        super().__init__(roles.start_ranks, config.timeouts, lambda value: value, planners=planners)
        self._roles = roles

    async def replaced(self, workers: Sequence[Any]) -> Sequence[Any]:
        """As of `LearnerGroup`; waits for lost nodes up to `timeouts.start_s`."""
        for worker in workers:
            worker.lose(WorkerDiedError(f"{worker.name} is ended"))
        try:
            async with asyncio.timeout(self._timeouts.start_s):
                await self._roles.all_up()
        except TimeoutError as error:
            lost = WorkerDiedError if self._roles.returning else NotRestartableError
            raise lost("the learner has no place: a node with learner ranks is gone") from error
        return self._spawn()


@dataclass(frozen=True)
class _Hosts:
    """Implements `mobula.cluster.workers.work_queue.Hosts` with simulated workers."""

    roles: SimulatedRoles
    role: str
    make: Callable[[], Any]

    def handle(self, index: int) -> Handle:
        worker = self.make()
        self.roles.workers.setdefault(self.role, []).append(worker)
        handle = Handle(worker, f"{self.role}/{index}")
        self.roles.handles[self.role, index] = handle
        return handle

    async def start(self, index: int) -> Handle:
        if self.roles.node_of(self.role, index) in self.roles.down:
            raise PlacementError(f"{self.role}/{index} has no place: its node is gone")
        return self.handle(index)

    async def stop(self, index: int, handle: Handle) -> None:
        handle.lose(WorkerDiedError(f"{handle.name} is ended"))

    async def release(self, index: int) -> None: ...


def with_role(resources: ResourcesConfig, role: str, workers: WorkerResources) -> ResourcesConfig:
    if role in type(resources).model_fields:
        return resources.model_copy(update={role: workers})
    name = role.partition(".")[2]
    services = {**resources.reward_services, name: workers}
    return resources.model_copy(update={"reward_services": services})


async def _release(index: int) -> None:
    """Nothing is reserved."""


async def _nothing() -> None:
    """Nothing is held."""
