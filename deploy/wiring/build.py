"""The wiring of a run: creates its roles and connects them. Every mode is chosen here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from mobula.actors.datasets.prompts import InDriver, PromptSource
from mobula.actors.datasets.rows import Row, count_by_reason
from mobula.actors.environments.rows import ENVIRONMENT
from mobula.actors.reference.pool import NullReference, ReferencePool
from mobula.cluster.audit.observer import AuditedRecovery, RunAudit
from mobula.cluster.controller import Controller
from mobula.cluster.guard.guard import LogprobGuard, NoGuard
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.hub import Metrics, StartUp
from mobula.cluster.records.trajectory import GroupSummary, Prompt
from mobula.cluster.recovery.checkpoints import Checkpoints, CheckpointSchedule, newest_learner_state
from mobula.cluster.recovery.lost_groups import GroupRegenerator, RegeneratingReference
from mobula.cluster.recovery.restartable_learner import RestartableLearner
from mobula.cluster.recovery.stop_request import StopRequest
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.roles import Rollouts, UpdateReport
from mobula.cluster.rollout.dispatcher import AdmissionFilter, GroupObserver, RetryingRollouts, RolloutDispatcher
from mobula.cluster.rollout.evaluation import InformingLog
from mobula.cluster.rollout.group_observers import EpisodeStages, OpeningRule, RejectionCounts, StageCurriculum
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import RolloutPool
from mobula.cluster.rollout.row_stream import SupervisedRows
from mobula.cluster.rollout.staleness import OvertakingOrder, StalenessGate, StepOrder
from mobula.cluster.runtime.ray_actors import answer, stop
from mobula.cluster.tracing.tracer import RunTracer
from mobula.cluster.weight_sync.probe_tokens import MEDIA, TEMPLATE, TEXT, classes_of
from mobula.cluster.weight_sync.tolerance import FreshSamples, Rounding, Tolerance
from mobula.cluster.weight_sync.weight_sync import Push, WeightSync
from mobula.cluster.workers.colocation import GpuLease, LeasedRollouts, LeasedWeights
from mobula.cluster.workers.status import RestartBudget, Scalable, WorkerState, WorkerStatus
from mobula.cluster.workers.supervisor import Supervisor, Watched, watched_pool
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER, write_config
from mobula.deploy.wiring.evaluation import RESPONSES_FOLDER, build_evaluator, record_evaluation, response_log
from mobula.deploy.wiring.guard import build_guard, judged_log, repeat_evaluation
from mobula.deploy.wiring.parity import parity_gate, tolerance_of
from mobula.deploy.wiring.persistence import age_limit, build_recovery, replay_buffer, step_learner
from mobula.deploy.wiring.pooled_roles import reference_folder, reference_pool, restart_policy, reward_pool, reward_role
from mobula.deploy.wiring.preparation import SUPERVISED_PATH, AnyPrepared, Prepared
from mobula.deploy.wiring.rollouts import rollout_pool, sampling_settings
from mobula.deploy.wiring.spawner import Spawner, learner_environment
from mobula.deploy.wiring.warm_start import warm_start
from mobula.learner.critic_ranks import CriticGroup, CriticRank, LearnerWithCritic
from mobula.learner.examples import planners_of
from mobula.learner.learner import Learner
from mobula.learner.learner_group import LearnerGroup, RankGroup
from mobula.learner.offline import OfflineLearner
from mobula.learner.shares import planner_of
from mobula.rewards.pool.reward_pool import RewardPool

POLICY_FOLDER = "policy"  # in the run folder: the trained policy, in the Hugging Face layout
MAX_REJECTED_STEPS = 20  # a run that rejects this many steps' worth of groups in a row has nothing to learn from
CANARY_OF = {
    MEDIA: MetricName.CANARY_MEDIA,
    TEMPLATE: MetricName.CANARY_TEMPLATE,
    TEXT: MetricName.CANARY_TEXT,
}
PROBE_CANDIDATES = 16
FRESH_TOKENS = 16  # response tokens for measuring the log-prob gap in steps with older tokens
ORDERS = {"wait": StepOrder, "overtake": OvertakingOrder}


@dataclass(frozen=True)
class Inference:
    """Roles that sample and score; evaluation needs only these."""

    rollouts: RolloutPool
    in_flight_requests: InFlightRequests  # of the rollout pool
    rewards: RewardPool
    watched: tuple[Watched, ...]


@dataclass(frozen=True)
class Training:
    """Learner, reference and replay buffer."""

    ranks: LearnerGroup  # without restarts: for the warm start, before there is a checkpoint
    learner: RestartableLearner
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


def spawn_training(
    prepared: Prepared,
    spawner: Spawner,
    on_lost: Callable[[str], None],
    on_rescore: Callable[[str], None],
    tracer: RunTracer,
) -> Training:
    """Starts learner ranks and reference scorers, which load in the background, and creates the replay buffer.

    Calls `on_rescore` with the reason when groups are scored again.
    """
    config, banned = prepared.config, prepared.processor.media_token_ids
    supervised = supervised_rows(prepared)
    ranks, learner, watched = spawn_learner(prepared, spawner, on_lost, supervised)
    frozen = prepared.teacher_folder or reference_folder(config)
    reference = reference_pool(
        config, spawner, frozen, banned, teachers=prepared.teachers, on_lost=on_lost, on_retry=on_rescore
    )
    return Training(
        ranks=ranks,
        learner=learner,
        reference=reference,
        replay=replay_buffer(config, tracer),
        watched=(*watched, *watched_reference(reference)),
        supervised=supervised,
    )


def supervised_rows(prepared: Prepared) -> SupervisedRows | None:
    """Returns the rows of `algorithm.supervised`; None without them."""
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
) -> tuple[LearnerGroup, RestartableLearner, list[Watched]]:
    """Starts the learner ranks; returns the group without restarts, with restarts, and each rank for the supervisor."""
    config = prepared.config
    ranks = learner_group(prepared, spawner, supervised)
    learner = RestartableLearner(
        ranks,
        newest=partial(newest_learner_state, config.run_folder / CHECKPOINTS_FOLDER),
        budget=RestartBudget(restart_policy(config)),
        on_lost=on_lost,
    )
    watched = [
        watched_rank(group, index, learner, config) for group in ranks.groups for index in range(len(group.workers))
    ]
    return ranks, learner, watched


def learner_group(prepared: AnyPrepared, spawner: Spawner, supervised: SupervisedRows | None) -> LearnerGroup:
    """Returns the learner ranks, including the ranks of a separate critic."""
    config, start = prepared.config, partial(start_learner, prepared, spawner)
    planners = planners_of(config)
    if not config.algorithm.critic.has_own_ranks:
        return LearnerGroup(start, config.timeouts, ray.put, supervised, planners)
    critic = CriticGroup(
        partial(_start_critic, prepared, spawner),
        config.timeouts,
        ray.put,
        planner_of(config.of_critic_ranks, role="critic"),
    )
    folder = reference_folder(config)
    return LearnerWithCritic(
        start, config.timeouts, ray.put, supervised, critic=critic, folder=folder, planners=planners
    )


def watched_reference(reference: ReferencePool | NullReference) -> list[Watched]:
    """Returns the reference scorers for the supervisor."""
    if not isinstance(reference, ReferencePool):
        return []
    return [watched_pool("reference", reference.pool.check, reference.pool.close)]


def scalable_roles(inference: Inference, training: Training) -> dict[str, Scalable]:
    """Returns the roles that can be scaled during the run, by name."""
    reference = training.reference
    rewards = {reward_role(name): service.pool for name, service in inference.rewards.services.items()}
    scorers = {"reference": reference.pool} if isinstance(reference, ReferencePool) else {}
    return {"rollout": inference.rollouts, **rewards, **scorers}


def rank_statuses(ranks: LearnerGroup, learner: RestartableLearner) -> list[WorkerStatus]:
    """Returns the status of learner ranks, which cannot be scaled."""
    if learner.is_restarting:
        state = WorkerState.WAITING
    else:
        state = WorkerState.SERVING if ranks.is_started else WorkerState.STARTING
    version = ranks.version if state is WorkerState.SERVING else None
    return [
        WorkerStatus(
            f"{group.role}/{index}",
            state,
            version,
            group.num_calls,
            learner.num_restarts,
            vitals=group.vitals[index] if index in group.vitals else None,
        )
        for group in ranks.groups
        for index in range(len(group.workers))
    ]


def build_controller(
    prepared: Prepared,
    inference: Inference,
    training: Training,
    metrics: Metrics,
    tracer: RunTracer,
    beside: Sequence[Watched],
    stop_request: StopRequest,
    audit: RunAudit,
) -> Controller:
    """Builds the main loop and its collaborators; the supervisor also watches the roles in `beside`.

    Prepares the held-out prompts. Call it in a thread: the event loop serves the processor workers.
    """
    config = prepared.config
    curriculum = _curriculum(config, metrics)
    inference.in_flight_requests.on_attempt = tracer.attempt
    source = prepared.source(partial(_is_open, curriculum) if curriculum else None)
    gpu_lease = GpuLease(inference.rollouts, training.learner) if config.resources.colocated else None
    if gpu_lease:
        inference.rollouts.start_within(gpu_lease.starting)
    rollouts = RetryingRollouts(
        LeasedRollouts(inference.rollouts, gpu_lease) if gpu_lease else inference.rollouts,
        inference.in_flight_requests,
        max_retries=config.max_rollout_retries,
        on_retry=partial(metrics.count, CounterName.ROLLOUT_RETRIES),
        on_sampled=partial(_on_sampled, metrics),
    )
    gate = _gate(config)
    stages = _stages(config, curriculum, source) if curriculum else None
    rejections = RejectionCounts(metrics)
    observers: Sequence[GroupObserver] = [rejections, stages] if stages else [rejections]
    dispatcher = _dispatcher(config, gate, source, rollouts, inference, training, metrics, tracer, observers, audit)
    guard = build_guard(config, training.ranks, training.learner, metrics, audit, dispatcher.reject_before)
    responses = InformingLog(judged_log(guard, response_log(prepared, config.run_folder / RESPONSES_FOLDER)))
    on_result = partial(record_evaluation, metrics)
    evaluator = build_evaluator(prepared, rollouts, inference.rewards, on_result, responses, training.replay)
    probe, others = probe_prompt(prepared)
    tolerance = tolerance_of(config)
    weights = _weights(prepared, inference, training, probe, others, tolerance)
    _measure_fresh(config, probe, inference, training)
    observe = partial(_observe, prepared, inference, metrics)
    weights.on_announced(dispatcher.advance)
    weights.on_published(partial(_after_push, metrics=metrics, observe=observe))
    weights.on_published(audit.pushed)
    weights.on_admitted(audit.admitted)
    training.learner.observe_with(audit)
    weights.on_arrived(parity_gate(prepared, training.learner, inference.rollouts.receivers, tolerance))
    if gpu_lease:
        weights.on_arrived(gpu_lease.arrived)  # after the gate, which needs scores of the learner
    regenerator = _regenerator(config, source, dispatcher, training, metrics, audit)
    reference = RegeneratingReference(training.reference, regenerator)
    # On shared devices engines cannot resample a group while the learner trains: a lost group then ends the run.
    learner = step_learner(
        config,
        training.learner,
        training.replay,
        metrics,
        audit,
        before=(evaluator.finish, gpu_lease.train) if gpu_lease else (),
        regenerate=None if gpu_lease else reference.regenerate,
        check=_check_of(config, tolerance.rounding),
        tracer=tracer,
    )
    checkpoints = Checkpoints(
        config.run_folder / CHECKPOINTS_FOLDER,
        learner=learner,
        parts={
            "stream": dispatcher,
            "evaluator": evaluator,
            "rejections": rejections,
            **({"curriculum": stages} if stages else {}),
            **({"supervised": training.supervised} if training.supervised else {}),
            **({"guard": guard} if guard else {}),
        },
        prepare=partial(_make_version_zero, prepared, training.ranks, metrics.start_up),
        finish=partial(training.learner.export, config.run_folder / POLICY_FOLDER),
        identity=prepared.identity,
        resume=config.resume,
        on_accepted=partial(write_config, config),
        schedule=CheckpointSchedule(config.checkpoints.interval_steps, config.num_steps, config.checkpoints.keep),
        recovery=AuditedRecovery(
            build_recovery(
                config,
                learner,
                source,
                dispatcher,
                training.replay,
                metrics,
                partial(repeat_evaluation, evaluator, on_result, guard),
                guard.repeat if guard else None,
            ),
            audit,
        ),
        **({"kept": guard.kept} if guard else {}),
        before_resume=gpu_lease.begin if gpu_lease else None,
    )
    return Controller(
        total_steps=config.num_steps,
        groups_per_step=config.algorithm.prompts_per_step,
        checkpoints=checkpoints,
        weights=LeasedWeights(weights, gpu_lease) if gpu_lease else weights,
        supervisor=Supervisor(
            [*training.watched, *inference.watched, *beside],
            [inference.rollouts],
            interval_s=config.supervision.interval_s,
            deadline_s=config.supervision.sign_timeout_s,
        ),
        rollouts=dispatcher,
        replay=training.replay,
        reference=reference,
        learner=learner,
        evaluator=evaluator,
        metrics=metrics,
        stop=stop_request,
        guard=guard or NoGuard(),
    )


async def _make_version_zero(prepared: Prepared, learner: LearnerGroup, start_up: StartUp) -> None:
    """Runs the warm start and saves the frozen copy for the reference."""
    await start_up.timing("warm start", warm_start(prepared, learner))
    await learner.begin_rl()
    await learner.export(reference_folder(prepared.config))


def _chunk_tokens(config: RunConfig) -> int:
    """Returns the tokens between two progress reports of a response; episodes report whole turns."""
    return config.sampler.max_tokens if config.environment.is_on else config.sampler.chunk_tokens


def start_learner(prepared: AnyPrepared, spawner: Spawner) -> list[Any]:
    """Returns the handles of all learner ranks, which load in the background.

    If a rank's node is gone, blocks until all ranks are placed again, or raises PlacementError.
    """
    config, processor = prepared.config, prepared.processor
    role = OfflineLearner if config.offline.is_on else Learner
    ranks = spawner.book_together("learner")
    env, ids = learner_environment(config), (processor.media_token_ids, processor.template_token_ids)
    return [spawner.start(role, config, w.index, len(ranks), *ids, worker=w, env=env) for w in ranks]


def _start_critic(prepared: AnyPrepared, spawner: Spawner) -> list[Any]:
    """Returns the handles of all ranks of a separate critic. Blocks and raises like `start_learner`."""
    ranks = spawner.book_together("critic")
    env = learner_environment(prepared.config)
    return [spawner.start(CriticRank, prepared.config, w.index, len(ranks), worker=w, env=env) for w in ranks]


def watched_rank(ranks: RankGroup, index: int, learner: RestartableLearner, config: RunConfig) -> Watched:
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

    return Watched(name, ping, close, on_lost=learner.lose)


def _gate(config: RunConfig) -> StalenessGate:
    return StalenessGate(
        prompts_per_step=config.algorithm.prompts_per_step,
        max_staleness=config.algorithm.max_staleness,
        max_concurrent=config.algorithm.max_concurrent_groups,
        total_steps=config.num_steps,
    )


def _dispatcher(
    config: RunConfig,
    gate: StalenessGate,
    source: PromptSource[Row, Prompt],
    rollouts: Rollouts,
    inference: Inference,
    training: Training,
    metrics: Metrics,
    tracer: RunTracer,
    observers: Sequence[GroupObserver],
    audit: RunAudit,
) -> RolloutDispatcher:
    algorithm = config.algorithm
    return RolloutDispatcher(
        prompts=source,
        gate=gate,
        rollouts=rollouts,
        rewards=inference.rewards,
        replay=training.replay,
        settings=sampling_settings(config),
        admission_filter=AdmissionFilter(
            min_scored=2 if algorithm.is_group_relative else 1,
            drop_uniform=algorithm.drop_uniform_groups,
            accuracy_component=config.rewards.accuracy_component if algorithm.uniform_by == "accuracy" else None,
            max_rejected_in_a_row=MAX_REJECTED_STEPS * algorithm.prompts_per_step,
        ),
        order=ORDERS[algorithm.stragglers](gate),
        age_limit=age_limit(config),
        on_lost=partial(metrics.count, CounterName.ROLLOUT_RETRIES),
        group_observers=observers,
        prefetches=not config.environment.curriculum.is_on,
        observer=audit,
        tracer=tracer,
    )


def _curriculum(config: RunConfig, metrics: Metrics) -> StageCurriculum | None:
    """Returns the curriculum over episodes; None without a curriculum."""
    curriculum = config.environment.curriculum
    if not curriculum.is_on:
        return None
    metrics.observe(MetricName.CURRICULUM_STAGE, 0)
    rule = OpeningRule(curriculum.episodes, curriculum.success if curriculum.kind == "success" else 0.0)
    return StageCurriculum(
        len(curriculum.stages), rule, on_opened=partial(metrics.observe, MetricName.CURRICULUM_STAGE)
    )


def _is_open(curriculum: StageCurriculum, row: Row) -> bool:
    return curriculum.is_open(row.metadata[ENVIRONMENT]["stage"])


def _stages(config: RunConfig, curriculum: StageCurriculum, source: PromptSource[Row, Prompt]) -> EpisodeStages:
    name, enough = config.rewards.accuracy_component, config.evaluation.correct_from
    return EpisodeStages(
        curriculum,
        place_of=lambda prompt_id: (
            source.index_of(prompt_id),
            source.row_of(prompt_id).metadata[ENVIRONMENT]["stage"],
        ),
        is_success=lambda reward: reward.components.get(name, reward.value) >= enough,
    )


def _regenerator(
    config: RunConfig,
    source: PromptSource[Row, Prompt],
    dispatcher: RolloutDispatcher,
    training: Training,
    metrics: Metrics,
    audit: RunAudit,
) -> GroupRegenerator:
    regenerator = GroupRegenerator(
        training.replay,
        LiveGroups(source, ray.put),
        dispatcher.sample_again,
        timeout_s=config.timeouts.object_s,
        on_lost=partial(metrics.count, CounterName.ROLLOUT_RETRIES),
        on_replaced=audit.regenerated,
    )
    training.learner.recall_with(regenerator.recall)
    return regenerator


def _check_of(config: RunConfig, rounding: Rounding) -> Callable[[UpdateReport], None]:
    """Returns the bound on the log-prob gap. There is no bound where equal weights can give different log-probs (a KV
    cache of older weights) or for flow models, whose sampler checks separate bounds."""
    if config.sampler.is_flow or config.weight_sync.kv_cache == "keep":
        return lambda report: None
    supervision, dtype = config.supervision, config.resources.dtype
    limit, stops = supervision.max_logprob_gap.of(dtype), supervision.on_logprob_gap == "stop"
    return LogprobGuard(dtype=dtype, limit=limit, rounding=rounding, stops=stops).check


def _measure_fresh(config: RunConfig, probe: Prompt, inference: Inference, training: Training) -> None:
    """Also measures the log-prob gap with fresh tokens if engines sample while the learner trains."""
    if config.algorithm.max_staleness == 0 or config.resources.colocated or config.sampler.is_flow:
        return
    sampling = sampling_settings(config)
    num_tokens = min(FRESH_TOKENS, sampling.max_tokens)
    settings = replace(sampling, num_samples=1, max_tokens=num_tokens)
    training.ranks.measure_with(FreshSamples(inference.rollouts.engines_of, probe, settings))


def _weights(
    prepared: Prepared,
    inference: Inference,
    training: Training,
    probe: Prompt,
    others: Sequence[Prompt],
    tolerance: Tolerance,
) -> WeightSync:
    sync = prepared.config.weight_sync
    weights = WeightSync(
        training.learner,
        inference.rollouts,
        bucket_bytes=sync.bucket_bytes,
        wave_size=sync.wave_size,
        max_attempts=sync.max_attempts,
        canary_interval=sync.canary_interval,
        canary_tolerance=tolerance,
        ranks_of_receiver=prepared.config.resources.rollout.tensor_parallel,
        probe=probe,
        probe_classes=classes_of(probe, others),
    )
    inference.rollouts.admit_with(weights.admit)
    return weights


def probe_prompt(prepared: Prepared) -> tuple[Prompt, list[Prompt]]:
    """Returns the prompt for comparing engines and learner: an early held-out prompt with an image, else the first; and
    the other early held-out prompts.
    """
    prompts = prepared.fixed_prompts(prepared.config.evaluation.split, PROBE_CANDIDATES).prompts
    probe = next((prompt for prompt in prompts if prompt.media), prompts[0])
    return probe, [prompt for prompt in prompts if prompt is not probe]


def _on_sampled(metrics: Metrics, summary: GroupSummary) -> None:
    metrics.start_up.responded()
    for kind, number in summary.failures.items():
        metrics.count(CounterName.EPISODE_FAILURES, kind, number)


async def _after_push(push: Push, *, metrics: Metrics, observe: Callable[[], None]) -> None:
    metrics.count(CounterName.WEIGHT_SYNCS, "push")
    metrics.start_up.ended("first push", push.seconds)
    metrics.observe(MetricName.PUSH_SECONDS, push.seconds)
    metrics.observe(MetricName.PUSH_BYTES, push.num_bytes)
    if push.changed_share is not None:
        metrics.observe(MetricName.PUSH_CHANGED_SHARE, push.changed_share)
    if push.num_resent:
        metrics.count(CounterName.WEIGHT_RESENDS, "missed", push.num_resent)
    if push.canary_gap is not None:
        metrics.observe(MetricName.CANARY, push.canary_gap)
        for name, gap in push.canary_by_class.items():
            metrics.observe(CANARY_OF[name], gap)
    observe()


def _observe(prepared: Prepared, inference: Inference, metrics: Metrics) -> None:
    """Adds the driver's counters since the previous step to the metrics."""
    metrics.observe(MetricName.MEDIA_BYTES_UNIQUE, prepared.media.num_bytes_unique)
    metrics.count_up_to(CounterName.RESUMED, inference.in_flight_requests.resumed)
    metrics.count_up_to(CounterName.REWARD_FAILURES, inference.rewards.failures)
    metrics.count_up_to(CounterName.SCORED_AHEAD, inference.rewards.scored_ahead)
    metrics.set_counts(CounterName.SKIPPED, count_by_reason(prepared.skipped))
