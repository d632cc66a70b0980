"""Starts the roles of a run: learner, reference, rewards, processors and rollouts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

from mobula.actors.datasets.prompts import InDriver, PromptSource
from mobula.actors.datasets.rows import Skipped
from mobula.actors.processors.pool import ProcessorPool
from mobula.actors.processors.worker import ProcessorWorker
from mobula.actors.reference.pool import NullReference, ReferencePool
from mobula.actors.reference.scorer import ReferenceScorer
from mobula.actors.rollout.actor import RolloutActor
from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.episodes import EpisodeActor, EpisodeSettings
from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.base import engine_settings as settings_of_engine
from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.cluster.recovery.lost_ranks import RestoredRanks
from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.rollout.row_stream import SupervisedRows
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.cluster.runtime.ray_actors import answer, stop
from mobula.cluster.training_service.engines import PackedWeights, PooledAdapterEngines, SampleLimits, SwappedEngines
from mobula.cluster.workers.status import RestartBudget, RestartPolicy, Scalable, WorkerState, WorkerStatus
from mobula.cluster.workers.supervisor import Watched, watched_pool
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.configs.schema.resources import REWARD_SERVICE
from mobula.configs.schema.rewards import SHARED_SERVICE
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER
from mobula.deploy.host.session import engine_environment, learner_environment
from mobula.deploy.wiring.persistence import RunContext, replay_buffer
from mobula.deploy.wiring.preparation import SUPERVISED_PATH, AnyPrepared, Prepared, PreparedJob
from mobula.deploy.wiring.spawner import RoleHosts, Spawner
from mobula.learner.critic_ranks import CriticGroup, CriticRank, LearnerWithCritic
from mobula.learner.examples import planners_of
from mobula.learner.learner import Learner
from mobula.learner.learner_group import LearnerGroup, RankGroup
from mobula.learner.policies.checkpoint import pushed_tensors
from mobula.learner.policies.shapes import shape_of
from mobula.learner.shares import planner_of
from mobula.learner.weight_publisher import WeightPublisher
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool, RewardService, ServiceSettings
from mobula.rewards.pool.worker import RewardWorker

AnyJob = TypeVar("AnyJob", bound=PreparedJob[Any, Any])
PROCESSOR = "processor"  # the role
REFERENCE_FOLDER = "reference"  # in the run folder: the frozen policy, in the Hugging Face layout


def reference_folder(config: RunConfig) -> Path:
    return config.run_folder / REFERENCE_FOLDER


def restart_policy(config: RunConfig) -> RestartPolicy:
    supervision = config.supervision
    return RestartPolicy(
        max_restarts=supervision.max_restarts,
        window_s=supervision.restart_window_s,
        backoff_s=supervision.backoff_s,
        max_backoff_s=supervision.max_backoff_s,
    )


def health_checks(config: RunConfig) -> HealthChecks:
    supervision = config.supervision
    return HealthChecks(
        interval_s=supervision.interval_s,
        probe_interval_s=supervision.probe_interval_s,
        max_failures_in_a_row=supervision.max_failures_in_a_row,
        no_worker_s=supervision.no_worker_s,
    )


def service_settings(config: RunConfig) -> ServiceSettings:
    """Returns the limits of the workers of a reward service; a call may wait for the start of its worker."""
    timeouts, pool = config.timeouts, config.rewards.pool
    return ServiceSettings(
        start_s=timeouts.start_s,
        alive_s=alive_s(config),
        timeout_s=timeouts.start_s + pool.batches_in_flight * pool.max_batch_groups * timeouts.reward_s,
        max_batch=pool.max_batch_groups,
        max_in_flight=pool.batches_in_flight,
        max_queued=pool.max_queued_groups,
        max_attempts=config.max_rollout_retries + 1,
    )


@dataclass(frozen=True)
class Processors:
    start: Callable[[], Coroutine[Any, Any, None]]  # returns when the workers serve
    watched: tuple[Watched, ...] = ()
    scalable: Mapping[str, Scalable] = field(default_factory=dict)  # by the name of the role


def spawn_processors(prepared: AnyJob, spawner: Spawner, on_lost: Callable[[str], None]) -> tuple[AnyJob, Processors]:
    """Starts the workers of `resources.processor`, which load in the background. Without workers the driver prepares
    prompts. Returns `prepared` with this choice, and the workers. Call it in the event loop of the pool."""
    config = prepared.config

    def start(worker: PlacedWorker) -> Any:
        return spawner.start(ProcessorWorker, config, worker=worker)

    workers = [start(worker) for worker in spawner.workers(PROCESSOR)]
    if not workers:
        return prepared, Processors(_nothing)
    timeouts = config.timeouts
    pool = ProcessorPool(
        workers,
        prepared.media,
        prepared.processor.num_media,
        hosts=RoleHosts(spawner, PROCESSOR, start, stop_s=timeouts.stop_s),
        restarts=restart_policy(config),
        start_s=timeouts.start_s,
        alive_s=alive_s(config),
        timeout_s=timeouts.prepare_s + (config.data.download_timeout_s if config.data.allowed_hosts else 0.0),
        object_s=timeouts.object_s,
        on_lost=on_lost,
    )
    watched = watched_pool(PROCESSOR, pool.pool.check, pool.pool.close)
    return replace(prepared, workers=pool), Processors(pool.start, (watched,), {PROCESSOR: pool.pool})


async def _nothing() -> None:
    """Returns immediately: there are no workers."""


def reward_pool(config: RunConfig, spawner: Spawner, on_lost: Callable[[str], None] = lambda kind: None) -> RewardPool:
    """Starts the reward workers of every service, which load in the background; `on_lost` gets the kind of a loss."""
    losses = LossCounter(on_lost)
    services = {name: _reward_service(config, spawner, name, losses) for name in config.rewards.services}
    return RewardPool(config.rewards, services, losses)


def reward_role(service: str) -> str:
    return service if service == SHARED_SERVICE else f"{REWARD_SERVICE}{service}"


def _reward_service(config: RunConfig, spawner: Spawner, name: str, losses: LossCounter) -> RewardService:
    role, start = reward_role(name), partial(_start_reward, config, spawner, name)
    return RewardService(
        role,
        [start(worker) for worker in spawner.workers(role)],
        hosts=RoleHosts(spawner, role, start, stop_s=config.timeouts.stop_s),
        restarts=restart_policy(config),
        settings=service_settings(config),
        on_lost=losses.count_loss,
    )


def reference_pool(
    config: RunConfig,
    spawner: Spawner,
    frozen: Path,
    banned: tuple[int, ...],
    *,
    teachers: Mapping[str, Path],
    on_lost: Callable[[str], None],
    on_retry: Callable[[str], None],
) -> ReferencePool | NullReference:
    """Starts scorers of the checkpoint in the folder `frozen`, which never sample a `banned` id. Returns a null object
    if the run needs no scorers. The folder may be written later, before scorers load it. Rows with a label in
    `teachers` are scored with that label's checkpoint.

    `on_lost` receives the kind of each loss, `on_retry` the reason for each retry of a share of a step.
    """
    timeouts = config.timeouts

    def start(worker: PlacedWorker) -> Any:
        return spawner.start(ReferenceScorer, config, banned, teachers, worker=worker)

    scorers = [start(worker) for worker in spawner.workers("reference")]
    if not scorers:
        return NullReference()
    return ReferencePool(
        scorers,
        frozen,
        hosts=RoleHosts(spawner, "reference", start, stop_s=timeouts.stop_s),
        restarts=restart_policy(config),
        alive_s=alive_s(config),
        timeout_s=timeouts.reference_s,
        max_attempts=config.max_rollout_retries + 1,
        on_lost=on_lost,
        on_retry=on_retry,
    )


def _start_reward(config: RunConfig, spawner: Spawner, service: str, worker: PlacedWorker) -> Any:
    timeouts = config.timeouts
    return spawner.start(
        RewardWorker,
        config.rewards,
        service,
        object_timeout_s=timeouts.object_s,
        start_timeout_s=timeouts.start_s,
        function_timeout_s=timeouts.reward_s / 4,
        group_timeout_s=timeouts.reward_s,
        device="cuda" if worker.num_gpus else "cpu",  # without a reserved GPU the worker sees no GPU
        dtype=config.resources.dtype,
        gpu_share=min(1.0, worker.num_gpus or 1.0),
        worker=worker,
    )


def alive_s(config: RunConfig) -> float:
    """Returns a ping timeout below the supervisor's, so that the pool replaces a silent worker first."""
    return config.supervision.sign_timeout_s / 2


CALLS_AT_A_TIME = 16  # concurrent calls of a rollout actor, not counting its stream of groups and scored prompts


def sampling_settings(config: RunConfig) -> SamplingSettings:
    sampler = config.sampler
    return SamplingSettings(
        num_samples=config.algorithm.samples_per_prompt,
        temperature=sampler.temperature,
        max_tokens=sampler.max_tokens,
        seed=config.seed,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        first_token_temperature=sampler.first_token_temperature,
        keeps_sets=sampler.is_cut,
        stop_strings=sampler.stop_strings,
    )


def rollout_pool(
    prepared: Prepared, spawner: Spawner, in_flight_requests: InFlightRequests, on_lost: Callable[[str], None]
) -> RolloutPool:
    """Returns the rollout pool; its `start` starts the engines. `on_lost` receives the kind of each loss."""
    config, timeouts, supervision = prepared.config, prepared.config.timeouts, prepared.config.supervision
    scored = config.sampler.vllm.max_num_seqs if config.sampler.adapters.are_on else 0

    role, *episodes = _role(config)

    def start(worker: PlacedWorker) -> Any:
        return spawner.start(
            role,
            config.sampler.kind,
            engine_settings(prepared, worker.index),
            *episodes,
            object_timeout_s=timeouts.object_s,
            worker=worker,
            env=engine_environment(config, worker),
            max_concurrency=CALLS_AT_A_TIME + scored,
        )

    hosts = RoleHosts(spawner, "rollout", start, stop_s=timeouts.stop_s)

    async def spawn(index: int) -> RolloutClient:
        return RolloutClient(
            await hosts.start(index),
            f"rollout/{index}",
            in_flight_requests=in_flight_requests,
            start_s=timeouts.start_s,
            rollout_s=timeouts.rollout_s,
            sync_s=config.weight_sync.answer_s,
            sign_s=supervision.sign_timeout_s,
            probe_s=supervision.probe_timeout_s,
            stop_s=timeouts.stop_s,
        )

    return RolloutPool(
        spawn,
        len(spawner.workers("rollout")),
        release=hosts.release,
        policy=restart_policy(config),
        health=health_checks(config),
        on_lost=on_lost,
        on_excluded=lambda prompt, error: prepared.note_skipped(Skipped(prompt.sample_id, error.reason, str(error))),
    )


def adapter_engines(
    prepared: Prepared, pool: RolloutPool, in_flight_requests: InFlightRequests, on_retry: Callable[[str], None]
) -> PooledAdapterEngines:
    """Returns the training service's view of a rollout pool. `on_retry` gets the kind of each retried failure."""
    config = prepared.config
    if not (config.sampler.adapters.are_on or config.training_service.weights == "full"):
        raise ValueError("sampler.adapters.max_served=0 serves no adapters: set it to 1 or more")
    retries = RetryingRollouts(pool, in_flight_requests, max_retries=config.max_rollout_retries, on_retry=on_retry)
    is_batched = config.sampler.kind is SamplerKind.VLLM
    sizes = prepared.engine
    in_batch = (sizes.num_seqs if sizes else config.sampler.vllm.max_num_seqs) if is_batched else 1
    limits = SampleLimits(
        max_model_len=config.sampler.max_model_len,
        num_token_ids=shape_of(str(prepared.model_folder)).vocab,
        max_in_flight=in_batch * config.resources.rollout.num_workers,
        counts_sequences=is_batched,
        object_s=config.timeouts.object_s,
    )
    return PooledAdapterEngines(pool, retries, limits)


def swapped_engines(
    prepared: Prepared, pool: RolloutPool, in_flight_requests: InFlightRequests, on_retry: Callable[[str], None]
) -> SwappedEngines:
    """Returns the view of a training service that trains all weights; otherwise as `adapter_engines`."""
    config = prepared.config
    bucket_bytes = config.weight_sync.bucket_bytes

    def read(folder: Path) -> PackedWeights:
        tensors = dict(pushed_tensors(folder))
        publisher = WeightPublisher(
            prepared.checkpoint,
            lambda: ((spec.name, tensors[spec.name]) for spec in prepared.checkpoint.tensors),
            rank=0,
            device=torch.device("cpu"),
            transport=config.resources.transport,
            timeout_s=config.weight_sync.timeout_s,
        )
        buckets = [ray.put(bucket) for bucket in publisher.export(bucket_bytes)]
        return PackedWeights(prepared.checkpoint, bucket_bytes, buckets)

    engines = adapter_engines(prepared, pool, in_flight_requests, on_retry)
    return SwappedEngines(engines, pool, read, prepared.model_folder)


def _role(config: RunConfig) -> tuple[Any, ...]:
    if not config.environment.is_on:
        return (RolloutActor,)
    return EpisodeActor, EpisodeSettings(
        config.environment, config.data, keeps_files=config.rewards.needs_images or config.plays_rows
    )


def engine_settings(prepared: Prepared, index: int) -> EngineSettings:
    """Returns the settings of engine `index`, with its sizes from the memory plan."""
    config, sizes = prepared.config, prepared.engine
    settings = settings_of_engine(config, prepared.model_folder, prepared.checkpoint, prepared.processor, index)
    if sizes is None:
        return settings
    return replace(
        settings,
        kv_cache_bytes=sizes.kv_cache_bytes,
        max_num_seqs=sizes.num_seqs,
        memory_bytes=sizes.memory_bytes,
    )


@dataclass(frozen=True)
class Inference:
    """Roles that sample and score; evaluation needs only these."""

    rollouts: RolloutPool
    in_flight_requests: InFlightRequests  # of the rollout pool
    rewards: RewardPool
    watched: tuple[Watched, ...]


@dataclass(frozen=True)
class Training:
    learner: LearnerGroup
    reference: ReferencePool | NullReference
    replay: ReplayBuffer
    watched: tuple[Watched, ...]
    supervised: SupervisedRows | None  # trained in addition to groups


def spawn_inference(prepared: Prepared, spawner: Spawner, on_lost: Callable[[str], None]) -> Inference:
    """Starts reward workers, which load in the background. The rollout pool starts its engines later."""
    config = prepared.config
    pool = reward_pool(config, spawner, on_lost)
    in_flight_requests = InFlightRequests(_chunk_tokens(config), on_ended=pool.score_ahead)
    return Inference(
        rollouts=rollout_pool(prepared, spawner, in_flight_requests, on_lost),
        in_flight_requests=in_flight_requests,
        rewards=pool,
        watched=(watched_pool("reward", pool.check, pool.close),),
    )


def spawn_training(prepared: Prepared, spawner: Spawner, run: RunContext) -> Training:
    """Starts learner ranks and reference scorers, which load in the background, and creates the replay buffer."""
    config, banned = prepared.config, prepared.processor.media_token_ids
    supervised = supervised_rows(prepared)
    learner, watched = spawn_learner(prepared, spawner, run.lost, supervised)
    frozen = prepared.teacher_folder or reference_folder(config)
    reference = reference_pool(
        config, spawner, frozen, banned, teachers=prepared.teachers, on_lost=run.lost, on_retry=run.rescored
    )
    return Training(
        learner=learner,
        reference=reference,
        replay=replay_buffer(config, run.tracer),
        watched=(*watched, *watched_reference(reference)),
        supervised=supervised,
    )


def supervised_rows(prepared: Prepared) -> SupervisedRows | None:
    config, found = prepared.config, prepared.supervised
    if found is None:
        return None
    source = PromptSource(
        found.report.rows,
        InDriver(found.processor),
        seed=config.seed,
        split_name=SUPERVISED_PATH,
        on_skipped=prepared.note_skipped,
    )
    num_rows = config.algorithm.supervised_rows_per_step
    return SupervisedRows(source, ray.put, rows_per_step=num_rows, total_steps=config.num_steps)


def spawn_learner(
    prepared: AnyPrepared,
    spawner: Spawner,
    on_lost: Callable[[str], None],
    supervised: SupervisedRows | None = None,
) -> tuple[LearnerGroup, list[Watched]]:
    """Starts the learner ranks; returns the group, and each rank for the supervisor."""
    learner = learner_group(prepared, spawner, supervised)
    return learner, restored_ranks(learner, prepared.config, on_lost)


def restored_ranks(learner: LearnerGroup, config: RunConfig, on_lost: Callable[[str], None]) -> list[Watched]:
    """Lets the ranks restart from the newest checkpoint after a loss; returns each rank for the supervisor."""
    learner.lost_ranks = RestoredRanks(
        learner,
        newest=partial(newest_learner_state, config.run_folder / CHECKPOINTS_FOLDER),
        budget=RestartBudget(restart_policy(config)),
        on_lost=on_lost,
    )
    return [
        watched_rank(group, index, learner, config) for group in learner.groups for index in range(len(group.workers))
    ]


def learner_group(prepared: AnyPrepared, spawner: Spawner, supervised: SupervisedRows | None) -> LearnerGroup:
    config, start = prepared.config, partial(start_learner, prepared, spawner)
    planners = planners_of(config)
    if not config.algorithm.critic.has_own_ranks:
        return LearnerGroup(start, config.timeouts, ray.put, supervised, planners)
    critic = CriticGroup(
        partial(start_ranks, CriticRank, "critic", config, spawner),
        config.timeouts,
        ray.put,
        planner_of(config.of_critic_ranks, role="critic"),
    )
    folder = reference_folder(config)
    return LearnerWithCritic(
        start, config.timeouts, ray.put, supervised, critic=critic, folder=folder, planners=planners
    )


def watched_reference(reference: ReferencePool | NullReference) -> list[Watched]:
    if not isinstance(reference, ReferencePool):
        return []
    return [watched_pool("reference", reference.pool.check, reference.pool.close)]


def scalable_roles(inference: Inference, training: Training) -> dict[str, Scalable]:
    reference = training.reference
    rewards = {reward_role(name): service.pool for name, service in inference.rewards.services.items()}
    scorers = {"reference": reference.pool} if isinstance(reference, ReferencePool) else {}
    return {"rollout": inference.rollouts, **rewards, **scorers}


def rank_statuses(learner: LearnerGroup) -> list[WorkerStatus]:
    if learner.lost_ranks.is_restarting:
        state = WorkerState.WAITING
    else:
        state = WorkerState.SERVING if learner.is_started else WorkerState.STARTING
    version = learner.version if state is WorkerState.SERVING else None
    return [
        WorkerStatus(
            f"{group.role}/{index}",
            state,
            version,
            group.num_calls,
            learner.num_restarts,
            vitals=group.vitals[index] if index in group.vitals else None,
        )
        for group in learner.groups
        for index in range(len(group.workers))
    ]


def _chunk_tokens(config: RunConfig) -> int:
    """Returns the tokens between two progress reports of a response; episodes report whole turns."""
    return config.sampler.max_tokens if config.environment.is_on else config.sampler.chunk_tokens


def start_learner(prepared: AnyPrepared, spawner: Spawner) -> list[Any]:
    ids = (prepared.processor.media_token_ids, prepared.processor.template_token_ids)
    return start_ranks(Learner, "learner", prepared.config, spawner, *ids)


def start_ranks(rank: type, role: str, config: RunConfig, spawner: Spawner, *arguments: Any) -> list[Any]:
    """Returns the handles of all ranks of a role, which load in the background. If a rank's node is gone, blocks until
    all ranks are placed again, or raises PlacementError."""
    workers, env = spawner.book_together(role), learner_environment(config)
    return [spawner.start(rank, config, w.index, len(workers), *arguments, worker=w, env=env) for w in workers]


def watched_rank(ranks: RankGroup, index: int, learner: LearnerGroup, config: RunConfig) -> Watched:
    """Watches a learner rank. The loss of a rank restarts all ranks; pings of replaced ranks are ignored."""
    name = f"{ranks.role}/{index}"

    async def ping() -> None:
        handle, deadline_s = ranks.workers[index], config.supervision.sign_timeout_s
        try:
            vitals = await answer(
                handle.is_alive.remote(), timeout_s=deadline_s, what=f"{name} to say that it is alive"
            )
        except Exception:
            if ranks.workers[index] is handle:
                raise
        else:
            ranks.vitals[index] = vitals

    async def close() -> None:
        await stop(ranks.workers[index], timeout_s=config.timeouts.stop_s, what=name)

    return Watched(name, ping, close, on_lost=learner.lost_ranks.lose)
