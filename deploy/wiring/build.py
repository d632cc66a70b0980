"""The wiring of a run or of an offline job: connects its roles to the main loop. Every mode is chosen here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from mobula.actors.datasets.prompts import PromptSource
from mobula.actors.datasets.rows import Row, count_by_reason
from mobula.actors.environments.rows import ENVIRONMENT
from mobula.actors.reference.pool import NullReference, ReferencePool
from mobula.cluster.controller import Controller
from mobula.cluster.guard.guard import LogprobGuard, NoGuard
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.hub import Metrics, StartUp
from mobula.cluster.metrics.step_records import EvaluationRecord
from mobula.cluster.metrics.summary import wilson_interval
from mobula.cluster.records.trajectory import GroupSummary, Prompt
from mobula.cluster.recovery.checkpoints import Recovery
from mobula.cluster.recovery.step_learner import GroupRegenerator, RegeneratingReference
from mobula.cluster.replay.buffer import LiveGroups
from mobula.cluster.roles import Rollouts, UpdateReport
from mobula.cluster.rollout.dispatcher import AdmissionFilter, GroupObserver, RetryingRollouts, RolloutDispatcher
from mobula.cluster.rollout.evaluation import EvaluationSchedule, InformingLog, RowEvaluator
from mobula.cluster.rollout.group_observers import EpisodeStages, OpeningRule, RejectionCounts, StageCurriculum
from mobula.cluster.rollout.row_stream import RowStream, stored
from mobula.cluster.rollout.staleness import OvertakingOrder, StalenessGate, StepOrder
from mobula.cluster.weight_sync.interfaces import NoReceivers
from mobula.cluster.weight_sync.tolerance import MEDIA, TEMPLATE, TEXT, FreshSamples, Rounding, Tolerance, classes_of
from mobula.cluster.weight_sync.weight_sync import Push, WeightSync
from mobula.cluster.workers.colocation import GpuLease, LeasedRollouts, LeasedWeights
from mobula.cluster.workers.status import Scalable
from mobula.cluster.workers.supervisor import Supervisor, Watched
from mobula.configs.schema import RunConfig
from mobula.deploy.checks.parity import parity_gate, tolerance_of
from mobula.deploy.wiring import evaluation
from mobula.deploy.wiring.persistence import (
    JudgedLog,
    RunContext,
    age_limit,
    build_guard,
    build_recovery,
    checkpoints_of,
    repeat_evaluation,
    step_learner,
)
from mobula.deploy.wiring.preparation import Prepared, PreparedRows
from mobula.deploy.wiring.roles import (
    Inference,
    Training,
    reference_folder,
    reference_pool,
    sampling_settings,
    spawn_learner,
    watched_reference,
)
from mobula.deploy.wiring.spawner import Spawner
from mobula.deploy.wiring.warm_start import warm_start
from mobula.learner.learner_group import LearnerGroup

_logger = logging.getLogger(__name__)

POLICY_FOLDER = "policy"  # in the run folder: the trained policy, in the Hugging Face layout
MAX_REJECTED_STEPS = 20  # a run that rejects this many steps' worth of groups in a row has nothing to learn from
CANARY_OF = {MEDIA: MetricName.CANARY_MEDIA, TEMPLATE: MetricName.CANARY_TEMPLATE, TEXT: MetricName.CANARY_TEXT}
PROBE_CANDIDATES = 16
FRESH_TOKENS = 16  # response tokens for measuring the log-prob gap in steps with older tokens
ORDERS = {"wait": StepOrder, "overtake": OvertakingOrder}


def build_controller(
    prepared: Prepared, inference: Inference, training: Training, run: RunContext, more: Sequence[Watched]
) -> Controller:
    """Builds the main loop and its collaborators; the supervisor also watches the roles in `more`. Prepares the
    held-out prompts: call it in a thread, since the event loop serves the processor workers."""
    config, metrics, audit = run.config, run.metrics, run.audit
    curriculum = _curriculum(config, metrics)
    inference.in_flight_requests.on_attempt = run.tracer.attempt
    source = prepared.source(partial(_is_open, curriculum) if curriculum else None)
    sends_adapters = config.weight_sync.payload == "adapters"
    gpu_lease = None
    if config.resources.colocated:
        gpu_lease = GpuLease(inference.rollouts, training.learner, sends_adapters=sends_adapters)
        inference.rollouts.start_within(gpu_lease.starting)
    rollouts = RetryingRollouts(
        LeasedRollouts(inference.rollouts, gpu_lease) if gpu_lease else inference.rollouts,
        inference.in_flight_requests,
        max_retries=config.max_rollout_retries,
        on_retry=run.retried,
        on_sampled=partial(_on_sampled, metrics),
    )
    stages = _stages(config, curriculum, source) if curriculum else None
    rejections = RejectionCounts(metrics)
    observers: Sequence[GroupObserver] = [rejections, stages] if stages else [rejections]
    dispatcher = _dispatcher(run, source, rollouts, inference, training, observers)
    guard = build_guard(run, training.learner, dispatcher.reject_before)
    responses = evaluation.response_log(
        prepared, config.run_folder / evaluation.RESPONSES_FOLDER, is_reported=bool(metrics.samples)
    )
    informing = InformingLog(JudgedLog(guard, responses) if guard else responses)
    accuracy = config.rewards.accuracy_component
    on_result = partial(
        evaluation.record_evaluation, metrics, config.run_folder / evaluation.RESPONSES_FOLDER, accuracy
    )
    evaluator = evaluation.build_evaluator(
        prepared, rollouts, inference.rewards, on_result, informing, training.replay.journal
    )
    # An early held-out prompt with an image, else the first, compares engines and learner.
    prompts = prepared.fixed_prompts(config.evaluation.split, PROBE_CANDIDATES).prompts
    probe = next((prompt for prompt in prompts if prompt.media), prompts[0])
    others = [prompt for prompt in prompts if prompt is not probe]
    tolerance = tolerance_of(config)
    weights = _weights(prepared, inference, training, probe, others, tolerance)
    _measure_fresh(config, probe, inference, training)
    weights.on_announced.append(dispatcher.advance)
    weights.on_published.append(partial(_after_push, prepared, inference, metrics))
    weights.on_published.append(audit.pushed)
    weights.on_admitted.append(audit.admitted)
    training.learner.lost_ranks.observers.append(audit)
    weights.on_arrived.append(
        parity_gate(config, prepared.processor, training.learner, inference.rollouts.receivers, tolerance)
    )
    if gpu_lease:
        weights.on_arrived.append(gpu_lease.arrived)  # after the gate, which needs scores of the learner
    regenerator = _regenerator(run, source, dispatcher, training)
    reference = RegeneratingReference(training.reference, regenerator)
    # On shared devices engines cannot resample a group while the learner trains: a lost group then ends the run.
    learner = step_learner(
        run,
        training.learner,
        training.replay,
        before=(evaluator.finish, gpu_lease.train) if gpu_lease else (),
        regenerate=None if gpu_lease else reference.regenerate,
        check=_check_of(config, tolerance.rounding),
    )
    recovery = build_recovery(
        run,
        learner,
        source,
        dispatcher,
        training.replay,
        partial(repeat_evaluation, evaluator, on_result, guard),
        guard.repeat if guard else None,
    )
    checkpoints = checkpoints_of(
        run,
        prepared.identity,
        learner,
        recovery,
        parts={
            "stream": dispatcher,
            "evaluator": evaluator,
            "rejections": rejections,
            **({"curriculum": stages} if stages else {}),
            **({"supervised": training.supervised} if training.supervised else {}),
            **({"guard": guard} if guard else {}),
        },
        prepare=partial(_make_version_zero, prepared, training.learner, metrics.start_up),
        finish=partial(training.learner.export, config.run_folder / POLICY_FOLDER),
        **({"kept": guard.kept} if guard else {}),
        before_resume=gpu_lease.begin if gpu_lease else None,
    )
    return Controller(
        total_steps=config.num_steps,
        groups_per_step=config.algorithm.prompts_per_step,
        checkpoints=checkpoints,
        weights=LeasedWeights(weights, gpu_lease) if gpu_lease else weights,
        supervisor=Supervisor(
            [*training.watched, *inference.watched, *more],
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
        stop=run.stop,
        guard=guard or NoGuard(),
    )


async def _make_version_zero(prepared: Prepared, learner: LearnerGroup, start_up: StartUp) -> None:
    await start_up.timing("warm start", warm_start(prepared, learner))
    await learner.begin_rl()
    await learner.export(reference_folder(prepared.config))


def _dispatcher(
    run: RunContext,
    source: PromptSource[Row, Prompt],
    rollouts: Rollouts,
    inference: Inference,
    training: Training,
    observers: Sequence[GroupObserver],
) -> RolloutDispatcher:
    config, algorithm = run.config, run.config.algorithm
    gate = StalenessGate(
        prompts_per_step=algorithm.prompts_per_step,
        max_staleness=algorithm.max_staleness,
        max_concurrent=algorithm.max_concurrent_groups,
        total_steps=config.num_steps,
    )
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
        on_lost=run.retried,
        group_observers=observers,
        prefetches=not config.environment.curriculum.is_on,
        observer=run.audit,
        tracer=run.tracer,
    )


def _curriculum(config: RunConfig, metrics: Metrics) -> StageCurriculum | None:
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
    run: RunContext, source: PromptSource[Row, Prompt], dispatcher: RolloutDispatcher, training: Training
) -> GroupRegenerator:
    regenerator = GroupRegenerator(
        training.replay,
        LiveGroups(source, ray.put),
        dispatcher.sample_again,
        timeout_s=run.config.timeouts.object_s,
        on_lost=run.retried,
        on_replaced=run.audit.regenerated,
    )
    training.learner.lost_ranks.recall = regenerator.recall
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
    training.learner.measure_with(FreshSamples(inference.rollouts.engines_of, probe, settings))


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


def _on_sampled(metrics: Metrics, summary: GroupSummary) -> None:
    metrics.start_up.responded()
    for kind, number in summary.failures.items():
        metrics.count(CounterName.EPISODE_FAILURES, kind, number)


async def _after_push(prepared: Prepared, inference: Inference, metrics: Metrics, push: Push) -> None:
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
    metrics.observe(MetricName.MEDIA_BYTES_UNIQUE, prepared.media.num_bytes_unique)
    metrics.count_up_to(CounterName.RESUMED, inference.in_flight_requests.resumed)
    metrics.count_up_to(CounterName.REWARD_FAILURES, inference.rewards.failures)
    metrics.count_up_to(CounterName.SCORED_AHEAD, inference.rewards.scored_ahead)
    metrics.set_counts(CounterName.SKIPPED, count_by_reason(prepared.skipped))


@dataclass(frozen=True)
class OfflineTraining:
    learner: LearnerGroup
    reference: ReferencePool | NullReference
    rows: RowStream
    watched: tuple[Watched, ...]

    @property
    def scalable(self) -> dict[str, Scalable]:
        return {"reference": self.reference.pool} if isinstance(self.reference, ReferencePool) else {}


def spawn_offline(
    prepared: PreparedRows, spawner: Spawner, run: RunContext, more: Sequence[Watched]
) -> OfflineTraining:
    """Starts the learner ranks, and reference scorers if the job compares with the initial policy. The supervisor also
    watches the roles in `more`."""
    config = prepared.config
    learner, watched = spawn_learner(prepared, spawner, run.lost)
    frozen = reference_folder(config)
    reference = reference_pool(config, spawner, frozen, (), teachers={}, on_lost=run.lost, on_retry=run.rescored)
    rows = RowStream(prepared.source(), ray.put, reference, total_steps=config.num_steps)
    return OfflineTraining(learner, reference, rows, (*watched, *watched_reference(reference), *more))


def build_offline_controller(
    prepared: PreparedRows, training: OfflineTraining, run: RunContext, put: Callable[[Any], Any] = ray.put
) -> Controller:
    """Builds the main loop of an offline job and its collaborators. Prepares the held-out rows: call it in a thread,
    since the event loop serves the processor workers."""
    config, metrics = run.config, run.metrics
    training.learner.lost_ranks.observers.append(run.audit)
    held_out = prepared.fixed_prompts(config.evaluation.split, config.evaluation.num_prompts)
    rows = [stored(row, 0, put) for row in held_out.prompts]
    identity = {
        "split": config.evaluation.split,
        "num_prompts": len(rows),
        "num_samples": 1,
        "rows": evaluation.content_of([row.summary.sha256 for row in rows]),
        "objective": evaluation.content_of(config.offline.model_dump(mode="json", exclude={"batch_size"})),
    }
    evaluator = RowEvaluator(
        rows=rows,
        learner=training.learner,
        reference=training.reference,
        schedule=EvaluationSchedule(config.evaluation.interval_steps, config.num_steps),
        on_result=partial(_record_result, metrics, identity),
        identity=identity,
    )
    checkpoints = checkpoints_of(
        run,
        prepared.identity,
        training.learner,
        Recovery(),
        parts={"stream": training.rows, "evaluator": evaluator},
        prepare=partial(_freeze_reference, prepared, training.learner),
        finish=partial(training.learner.export, config.run_folder / POLICY_FOLDER),
    )
    return Controller(
        total_steps=config.num_steps,
        groups_per_step=config.offline.batch_size,
        checkpoints=checkpoints,
        weights=_Unpushed(prepared, metrics),
        supervisor=Supervisor(
            training.watched, interval_s=config.supervision.interval_s, deadline_s=config.supervision.sign_timeout_s
        ),
        rollouts=training.rows,
        replay=training.rows,
        reference=NullReference(),  # the row stream has scored them
        learner=training.learner,
        evaluator=evaluator,
        metrics=metrics,
        stop=run.stop,
    )


@dataclass(frozen=True)
class _Unpushed(NoReceivers):
    """Updates the driver's metrics at the end of a step instead of pushing weights."""

    prepared: PreparedRows
    metrics: Metrics

    async def publish(self, version: int) -> int:
        self.metrics.observe(MetricName.MEDIA_BYTES_UNIQUE, self.prepared.media.num_bytes_unique)
        self.metrics.set_counts(CounterName.SKIPPED, count_by_reason(self.prepared.skipped))
        return version


async def _freeze_reference(prepared: PreparedRows, learner: LearnerGroup) -> None:
    if prepared.config.needs_reference:
        await learner.export(reference_folder(prepared.config))


def _record_result(metrics: Metrics, identity: Mapping[str, Any], version: int, values: Mapping[str, float]) -> None:
    _logger.info(
        "held-out rows at version %d: %s", version, ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    )
    metrics.observe(MetricName.HELD_OUT_LOSS, values[MetricName.LOSS])
    if MetricName.MARGIN in values:
        metrics.observe(MetricName.HELD_OUT_MARGIN, values[MetricName.MARGIN])
    accuracy, num_rows = min(values[MetricName.ACCURACY], 1.0), identity["num_prompts"]
    interval = wilson_interval(accuracy, num_rows)
    record = EvaluationRecord(version, accuracy, *interval, num_rows, values=dict(values), identity=identity)
    if not metrics.totals.has_evaluation(record):  # an earlier part of this run may have recorded it
        metrics.record_evaluation(record)
