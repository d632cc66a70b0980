"""The wiring of a run: which roles there are, and who is given whom. Every mode is chosen here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.datasets.jsonl import count_by_reason
from actors.datasets.prompts import PromptSource, fixed_prompts
from actors.reference_pool import NullReference, ReferencePool
from actors.reference_scorer import ReferenceScorer
from actors.rollout_actor import RolloutActor
from actors.rollout_client import RolloutClient, RolloutPool
from actors.samplers.base import EngineSettings
from cluster.checkpoints import Checkpoints, CheckpointSchedule, run_identity
from cluster.concurrency import run_all
from cluster.controller import Controller
from cluster.evaluation import EvaluationResult, EvaluationSchedule, Evaluator
from cluster.metrics.definitions import CounterName, MetricName
from cluster.metrics.hub import Metrics
from cluster.placement import PlacedWorker
from cluster.ray_group import answer, stop
from cluster.replay_buffer import ReplayBuffer
from cluster.replay_client import ReplayClient
from cluster.roles import Rewards, Rollouts, SamplingSettings
from cluster.rollout_stream import AdmissionFilter, RetryingRollouts, RolloutStream
from cluster.staleness import StalenessGate
from cluster.supervision import Supervisor, Watched
from cluster.trajectory import Prompt
from cluster.weight_sync.manifest import checkpoint_manifest
from cluster.weight_sync.publish import Push, WeightSync
from configs.schema import RunConfig
from deploy.preparation import TRAIN, Prepared
from deploy.records import build_journal_writer, build_records
from deploy.spawner import Spawner, engine_environment
from deploy.warm_start import warm_start
from learner.learner import Learner
from learner.learner_group import LearnerGroup
from rewards.pool import RewardPool
from rewards.worker import RewardWorker

ENGINE_SEED_STRIDE = 7919  # engines of one run never share a seed; requests carry seeds of their own besides
WATCH_INTERVAL_S = 5.0
REFERENCE_FOLDER = "reference"  # of the run folder: the frozen policy, in the Hugging Face layout
POLICY_FOLDER = "policy"  # of the run folder: the trained policy, in the same layout
REWARD_GROUPS_IN_FLIGHT = 8  # of one worker; more wait in the pool, where another worker can still take them
REPLAY_CALLS = 64  # beside the groups that wait for room; one of them may be a take() that waits
CONTROL_CALLS = 16  # of a rollout actor, beside the prompts in flight: they must never queue behind those
MAX_REJECTED_STEPS = 20  # a run that rejects this many steps' worth of groups in a row has nothing to learn from
PROBE_CANDIDATES = 16


@dataclass(frozen=True)
class Inference:
    """The roles that answer and judge; all that evaluation needs."""

    clients: tuple[RolloutClient, ...]
    rollouts: RolloutPool
    rewards: RewardPool
    watched: tuple[Watched, ...]

    async def start(self) -> None:
        """Wait until every engine is loaded."""
        await run_all(*(client.start() for client in self.clients))


@dataclass(frozen=True)
class Training:
    """The roles that RL needs besides."""

    learner: LearnerGroup
    reference: ReferencePool | NullReference
    replay: ReplayClient
    watched: tuple[Watched, ...]


def spawn_inference(prepared: Prepared, spawner: Spawner) -> Inference:
    """Start rollout actors and reward workers; they build themselves in the background."""
    config = prepared.config
    engines = {w.name: _start_rollout(prepared, spawner, w) for w in spawner.workers("rollout")}
    rewards = {w.name: _start_reward(config, spawner, w.index) for w in spawner.workers("reward")}
    clients = tuple(_rollout_client(config, name, handle) for name, handle in engines.items())
    pool = _reward_pool(config, spawner, list(rewards.values()))
    judges = (_watched(name, partial(_worker_of, pool, i), config) for i, name in enumerate(rewards))
    return Inference(
        clients=clients,
        rollouts=RolloutPool(clients),
        rewards=pool,
        watched=(*_watched_all(engines, config), *judges),
    )


def spawn_training(prepared: Prepared, spawner: Spawner) -> Training:
    """Start learner ranks, reference scorers and the replay buffer; they build themselves in the background."""
    config, banned = prepared.config, prepared.processor.media_token_ids
    ranks = spawner.workers("learner")
    learners = {w.name: spawner.start(Learner, config, w.index, len(ranks), banned, worker=w) for w in ranks}
    scorers = {w.name: spawner.start(ReferenceScorer, config, banned, worker=w) for w in spawner.workers("reference")}
    [place] = spawner.workers("replay")
    replay = spawner.start(
        ReplayBuffer,
        worker=place,
        max_concurrency=config.algorithm.max_concurrent_groups + REPLAY_CALLS,
        journal=build_journal_writer(config),
        max_bytes=config.replay.max_bytes,
        min_ready=config.algorithm.prompts_per_step,
    )
    reference = ReferencePool(
        list(scorers.values()), reference_folder(config), timeout_s=config.timeouts.reference_s
    )
    return Training(
        learner=LearnerGroup(list(learners.values()), config.timeouts),
        reference=reference if scorers else NullReference(),
        replay=ReplayClient(
            replay,
            call_s=config.timeouts.object_s,
            take_s=_take_deadline(config),
            reserve_s=config.timeouts.backpressure_s,
        ),
        watched=_watched_all({**learners, **scorers, place.name: replay}, config),
    )


def build_controller(prepared: Prepared, inference: Inference, training: Training, metrics: Metrics) -> Controller:
    """The loop with everything that it asks of others."""
    config = prepared.config
    source = PromptSource(prepared.splits[TRAIN].rows, prepared.processor, seed=config.seed, split_name=TRAIN)
    rollouts = RetryingRollouts(
        inference.rollouts,
        max_retries=config.max_rollout_retries,
        on_retry=partial(metrics.count, CounterName.ROLLOUT_RETRIES),
    )
    stream = _stream(config, source, rollouts, inference, training)
    evaluator = build_evaluator(prepared, rollouts, inference.rewards, partial(_record_evaluation, metrics))
    weights = _weights(prepared, inference, training)
    observe = partial(_observe, prepared, source, inference.rewards, metrics)
    weights.on_published(partial(_after_push, stream=stream, metrics=metrics, observe=observe))
    records = build_records(config, training.learner, source, stream, training.replay, metrics)
    checkpoints = Checkpoints(
        config.run_folder / "checkpoints",
        learner=records.durable,
        parts={"stream": stream, "evaluator": evaluator},
        prepare=partial(_make_version_zero, prepared, training.learner),
        finish=partial(training.learner.export, config.run_folder / POLICY_FOLDER),
        identity=run_identity(config),
        resume=config.resume,
        schedule=CheckpointSchedule(config.checkpoints.interval_steps, config.num_steps, config.checkpoints.keep),
        recovery=records.recovery,
    )
    return Controller(
        total_steps=config.num_steps,
        groups_per_step=config.algorithm.prompts_per_step,
        checkpoints=checkpoints,
        weights=weights,
        supervisor=Supervisor([*training.watched, *inference.watched], interval_s=WATCH_INTERVAL_S, deadline_s=config.timeouts.update_s),
        rollouts=stream,
        replay=training.replay,
        reference=training.reference,
        learner=records.learner,
        evaluator=evaluator,
        metrics=metrics,
    )


async def _make_version_zero(prepared: Prepared, learner: LearnerGroup) -> None:
    """The warm start, and the frozen copy of its result that the reference scores with."""
    await warm_start(prepared, learner)
    await learner.export(reference_folder(prepared.config))


def reference_folder(config: RunConfig) -> Path:
    """Where the frozen policy of a run lies, in the Hugging Face layout."""
    return config.run_folder / REFERENCE_FOLDER


def sampling_settings(config: RunConfig) -> SamplingSettings:
    """How training samples."""
    return SamplingSettings(
        num_samples=config.algorithm.samples_per_prompt,
        temperature=config.sampler.temperature,
        max_tokens=config.sampler.max_tokens,
        seed=config.seed,
    )


def _start_rollout(prepared: Prepared, spawner: Spawner, worker: PlacedWorker) -> Any:
    config = prepared.config
    return spawner.start(
        RolloutActor,
        config.sampler.kind.value,
        _engine_settings(prepared, worker.index),
        object_timeout_s=config.timeouts.object_s,
        worker=worker,
        env=engine_environment(config, worker),
        max_concurrency=config.algorithm.max_concurrent_groups + CONTROL_CALLS,
    )


def _rollout_client(config: RunConfig, name: str, handle: Any) -> RolloutClient:
    timeouts = config.timeouts
    return RolloutClient(
        handle, name, start_s=timeouts.start_s, rollout_s=timeouts.rollout_s, sync_s=config.weight_sync.timeout_s
    )


def _engine_settings(prepared: Prepared, index: int) -> EngineSettings:
    config, sampler, processor = prepared.config, prepared.config.sampler, prepared.processor
    return EngineSettings(
        model=config.policy.model,
        dtype=config.resources.dtype,
        device=config.resources.device,
        seed=config.seed + ENGINE_SEED_STRIDE * (index + 1),
        max_model_len=sampler.max_model_len,
        max_num_seqs=sampler.max_num_seqs,
        max_num_batched_tokens=sampler.max_num_batched_tokens,
        max_images_per_prompt=sampler.max_images_per_prompt,
        kv_cache_bytes=sampler.kv_cache_bytes,
        block_size=sampler.block_size,
        enforce_eager=sampler.enforce_eager,
        banned_ids=processor.media_token_ids,
        stop_ids=processor.eos_token_ids,
        pad_id=processor.pad_token_id,
        expected=checkpoint_manifest(prepared.model_folder, config.resources.dtype),
    )


def _start_reward(config: RunConfig, spawner: Spawner, index: int) -> Any:
    timeouts = config.timeouts
    return spawner.start(
        RewardWorker,
        config.rewards.components,
        object_timeout_s=timeouts.object_s,
        start_timeout_s=timeouts.start_s,
        function_timeout_s=timeouts.reward_s / 4,
        group_timeout_s=timeouts.reward_s,
        worker=spawner.workers("reward")[index],
    )


def _reward_pool(config: RunConfig, spawner: Spawner, handles: Sequence[Any]) -> RewardPool:
    async def respawn(index: int, lost: Any) -> Any:
        await stop(lost, timeout_s=config.timeouts.stop_s, what=f"reward/{index}")
        return _start_reward(config, spawner, index)

    return RewardPool(
        handles,
        respawn=respawn,
        timeout_s=config.timeouts.start_s + REWARD_GROUPS_IN_FLIGHT * config.timeouts.reward_s,
        max_in_flight=REWARD_GROUPS_IN_FLIGHT,
        max_attempts=config.max_rollout_retries + 1,
        on_failure=config.rewards.on_failure,
    )


def _take_deadline(config: RunConfig) -> float:
    """The longest that a step's groups may take: every try of the slowest prompt, and its reward."""
    return (config.max_rollout_retries + 1) * config.timeouts.rollout_s + config.timeouts.reward_s


def _watched_all(handles: Mapping[str, Any], config: RunConfig) -> tuple[Watched, ...]:
    return tuple(_watched(name, lambda handle=handle: handle, config) for name, handle in handles.items())


def _worker_of(pool: RewardPool, index: int) -> Any:
    """The reward worker that serves now: the pool replaces those that it loses."""
    return pool.workers[index]


def _watched(name: str, current: Callable[[], Any], config: RunConfig) -> Watched:
    deadline_s = config.timeouts.update_s

    async def ping() -> None:
        await answer(current().is_alive.remote(), timeout_s=deadline_s, what=f"{name} to say that it lives")

    async def close() -> None:
        await stop(current(), timeout_s=config.timeouts.stop_s, what=name)

    return Watched(name, ping, close)


def _stream(
    config: RunConfig, source: PromptSource, rollouts: Rollouts, inference: Inference, training: Training
) -> RolloutStream:
    algorithm = config.algorithm
    return RolloutStream(
        prompts=source,
        gate=StalenessGate(
            prompts_per_step=algorithm.prompts_per_step,
            max_staleness=algorithm.max_staleness,
            max_concurrent=algorithm.max_concurrent_groups,
            total_steps=config.num_steps,
        ),
        rollouts=rollouts,
        rewards=inference.rewards,
        replay=training.replay,
        settings=sampling_settings(config),
        admission_filter=AdmissionFilter(
            min_scored=2 if algorithm.is_group_relative else 1,
            drop_uniform=algorithm.drop_uniform_groups,
            max_rejected_in_a_row=MAX_REJECTED_STEPS * algorithm.prompts_per_step,
        ),
    )


def build_evaluator(
    prepared: Prepared, rollouts: Rollouts, rewards: Rewards, on_result: Callable[[EvaluationResult], None]
) -> Evaluator:
    """Held-out evaluation with the run's own rollout actors."""
    config = prepared.config
    held_out = fixed_prompts(
        prepared.usable(config.evaluation.split), prepared.processor, config.evaluation.num_prompts
    )
    return Evaluator(
        prompts=held_out.prompts,
        rollouts=rollouts,
        rewards=rewards,
        settings=SamplingSettings(1, config.evaluation.temperature, config.sampler.max_tokens, config.seed),
        accuracy_component=config.rewards.accuracy_component,
        max_concurrent=config.algorithm.max_concurrent_groups * config.algorithm.samples_per_prompt,
        schedule=EvaluationSchedule(config.evaluation.interval_steps, config.num_steps),
        on_result=on_result,
    )


def _weights(prepared: Prepared, inference: Inference, training: Training) -> WeightSync:
    sync = prepared.config.weight_sync
    return WeightSync(
        training.learner,
        inference.clients,
        bucket_bytes=sync.bucket_bytes,
        canary_interval=sync.canary_interval,
        canary_tolerance=sync.canary_tolerance,
        probe=probe_prompt(prepared),
    )


def probe_prompt(prepared: Prepared) -> Prompt:
    """The prompt on which engines and learner are compared: an early held-out one with a picture, else the first."""
    config = prepared.config
    prompts = fixed_prompts(prepared.usable(config.evaluation.split), prepared.processor, PROBE_CANDIDATES).prompts
    return next((prompt for prompt in prompts if prompt.media), prompts[0])


def _record_evaluation(metrics: Metrics, result: EvaluationResult) -> None:
    if any(known.version == result.version for known in metrics.totals.evaluations):
        return  # an earlier part of this run has recorded it, later than the checkpoint that this one went on from
    metrics.record_evaluation(result.version, result.accuracy, (result.low, result.high), result.num_scored)


async def _after_push(push: Push, *, stream: RolloutStream, metrics: Metrics, observe: Callable[[], None]) -> None:
    stream.advance(push.version)
    metrics.count(CounterName.WEIGHT_SYNCS, "push")
    if push.canary_gap is not None:
        metrics.observe(MetricName.CANARY, push.canary_gap)
    observe()


def _observe(prepared: Prepared, source: PromptSource, rewards: RewardPool, metrics: Metrics) -> None:
    """What the driver's own parts have counted since the step before."""
    metrics.observe(MetricName.MEDIA_BYTES_UNIQUE, prepared.media.num_bytes_unique)
    metrics.count_up_to(CounterName.REWARD_FAILURES, rewards.failures)
    prepared.late_skips[:] = source.skipped
    metrics.set_counts(CounterName.SKIPPED, count_by_reason(prepared.skipped))
