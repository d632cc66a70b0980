"""Builds what a run writes and judges itself by: audit, metrics, journal, recovery, held-out evaluation, guard."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from rich.console import Console

from mobula.actors.datasets.prompts import PromptSource
from mobula.actors.datasets.rows import Row
from mobula.cluster.audit.chain import ChainWriter, SigningKey
from mobula.cluster.audit.observer import AuditedRecovery, RunAudit
from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.cluster.guard.guard import GuardAction, KLScale, RaiseKL, Rollback, RunGuard, Stop, Warn, Watch
from mobula.cluster.guard.signs import DRIFTS, Divergence, Observer, Quantity, Series, Sign
from mobula.cluster.metrics.artifacts import ArtifactWriter, refuse_without_encoder
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.guard_events import GUARD_FILE, GuardEvent, GuardLog, SignalWatch
from mobula.cluster.metrics.hub import Metrics, StartUp
from mobula.cluster.metrics.report.run_folder import METRICS_FILE, SAMPLES_FILE
from mobula.cluster.metrics.report.samples import ARTIFACTS_FOLDER, SampleKeeper
from mobula.cluster.metrics.sinks.base import Sink
from mobula.cluster.metrics.sinks.console import ConsoleSink, EstimateSink
from mobula.cluster.metrics.sinks.jsonl import JsonlSink, read_records
from mobula.cluster.metrics.sinks.ray_gauges import RaySink
from mobula.cluster.metrics.sinks.tensorboard import TensorBoardSink
from mobula.cluster.metrics.sinks.trackers import TrackedRun, refuse_missing, tracker
from mobula.cluster.metrics.step_records import HELD_OUT, StepRecord
from mobula.cluster.records.trajectory import Prompt, Reward
from mobula.cluster.recovery.checkpoints import Checkpoints, CheckpointSchedule, Durable, Recovery, newest_learner_state
from mobula.cluster.recovery.resume import AfterRepeat, JournalRecovery, NoRecovery
from mobula.cluster.recovery.step_learner import DurableLearner, StepLearner
from mobula.cluster.recovery.stop_request import StopRequest
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal, Recovered, journal_identity
from mobula.cluster.replay.journal_writer import GroupJournal, JournalWriter
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.cluster.rollout.dispatcher import RolloutDispatcher
from mobula.cluster.rollout.evaluation import EvaluationResult, EvaluationSchedule, Evaluator, ResponseLog, ScoredPrompt
from mobula.cluster.rollout.staleness import AgeLimit
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer, build_tracer, refuse_missing_exporter
from mobula.configs.rules.run import guard_signs
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER, write_config
from mobula.learner.learner_group import LearnerGroup

CONSOLE_INTERVAL_S = 10.0
RUN_ID_FILE = "run_id"  # in the run folder: name and id of the run
_logger = logging.getLogger(__name__)


def build_metrics(
    config: RunConfig,
    console: Console,
    version: int,
    sinks: Sequence[Sink] = (),
    tracer: RunTracer = UNTRACED,
    start_up: StartUp | None = None,
    audit: RunAudit | None = None,
) -> Metrics:
    """Returns the metrics hub of a run resumed at `version`, with its earlier records; `sinks` come last."""
    folder = config.run_folder
    journal = JsonlSink(folder / METRICS_FILE, version=version)
    samples = SampleKeeper(
        folder / SAMPLES_FILE,
        limit=config.metrics.num_report_samples,
        num_steps=config.num_steps,
        seed=config.seed,
        version=version,
        fetch=fetch,
        timeout_s=config.timeouts.object_s,
        write=audit.write if audit else write_atomically,
    )
    artifacts = [_artifacts(config, version)] if config.metrics.artifacts_per_step > 0 else []
    optional = _optional_sinks(config, console, version)
    metrics = Metrics(
        [*([audit] if audit else []), journal, EstimateSink(num_steps=config.num_steps), *optional, *sinks],
        time.perf_counter,
        accuracy_component=config.rewards.accuracy_component,
        samples=[samples, *artifacts],
        watchers=[sink for sink in optional if isinstance(sink, RaySink)],
        signal=SignalWatch(
            learns_from_rewards=not (config.offline.is_on or config.algorithm.distillation.is_on),
            fetch=fetch,
            timeout_s=config.timeouts.object_s,
        ),
        tracer=tracer,
        start_up=start_up or StartUp(time.perf_counter()),
    )
    metrics.resume(journal.kept)
    return metrics


def _artifacts(config: RunConfig, version: int) -> ArtifactWriter:
    if config.sampler.flow.num_frames > 1:
        refuse_without_encoder()
    return ArtifactWriter(
        config.run_folder / ARTIFACTS_FOLDER,
        per_step=config.metrics.artifacts_per_step,
        frame_rate=config.metrics.artifact_frame_rate,
        version=version,
        fetch=fetch,
        timeout_s=config.timeouts.object_s,
    )


def check_exporters(config: RunConfig) -> None:
    """Checks that the libraries of the configured trackers and of the traces are installed."""
    refuse_missing(config.metrics.trackers)
    refuse_missing_exporter(config.tracing)


def run_id(config: RunConfig) -> str:
    """Returns the id of the run for trackers, which the run folder keeps. A run without a checkpoint starts, and has a
    new id; so has a copy of a run folder that continues under another name."""
    path, is_resumed = config.run_folder / RUN_ID_FILE, any((config.run_folder / CHECKPOINTS_FOLDER).glob("step-*"))
    name, _, known = path.read_text(encoding="utf-8").strip().partition(" ") if path.is_file() else ("", "", "")
    if is_resumed and name == config.name and known:
        return known
    made = uuid4().hex
    write_atomically(path, f"{config.name} {made}\n")
    return made


def _optional_sinks(config: RunConfig, console: Console, version: int) -> list[Sink]:
    chosen, makers = config.metrics, dict[str, Callable[[], Sink]]()
    if chosen.tensorboard:
        makers["tensorboard"] = partial(TensorBoardSink, config.run_folder / "tensorboard", version=version)
    if chosen.trackers:
        settings, address = config.model_dump(mode="json"), chosen.tracker_address
        tracked = TrackedRun(run_id(config), config.name, chosen.project, config.run_folder, address, settings)
        makers |= {name: partial(tracker(name), tracked) for name in chosen.trackers}
    if chosen.ray:
        tags = {"run": config.name, "role": "controller", "index": "0"}
        makers["ray"] = partial(RaySink, tags, heartbeat_s=chosen.heartbeat_s)
    if chosen.progress:
        steps = {"num_steps": config.num_steps, "version": version}
        makers["console"] = partial(ConsoleSink, console, time.perf_counter, interval_s=CONSOLE_INTERVAL_S, **steps)
    return [sink for name, make in makers.items() if (sink := _started(name, make)) is not None]


def _started(name: str, make: Callable[[], Sink]) -> Sink | None:
    """Returns the sink; None if it cannot start because a disk or server is unavailable."""
    try:
        return make()
    except (ValueError, PreflightError):
        raise
    except Exception:
        _logger.exception("metrics sink %s cannot start; the run goes on without it", name)
        return None


@dataclass(frozen=True)
class RunContext:
    """Where the parts of a run report, and the stop that a user requests."""

    config: RunConfig
    metrics: Metrics
    stop: StopRequest
    tracer: RunTracer = UNTRACED
    audit: RunAudit = field(default_factory=RunAudit)

    def lost(self, kind: str) -> None:
        self.metrics.count(CounterName.RESTARTS, kind)

    def rescored(self, reason: str) -> None:
        self.metrics.count(CounterName.REFERENCE_RETRIES, reason)

    def retried(self, kind: str) -> None:
        self.metrics.count(CounterName.ROLLOUT_RETRIES, kind)


def run_context(
    config: RunConfig, console: Console, version: int, sinks: Sequence[Sink], start_up: StartUp, key: SigningKey | None
) -> RunContext:
    """Returns the context of a run that resumes at `version`; `key` signs its audit, and `sinks` get its records."""
    tracer = build_tracer(config.tracing, config.name, config.run_folder)
    audit, folder = RunAudit(), config.run_folder
    if config.metrics.audit:  # continues the chain of an earlier part
        chain = ChainWriter(folder, close_s=config.timeouts.stop_s, key=key)
        audit = RunAudit(chain, folder, folder / CHECKPOINTS_FOLDER)
    metrics = build_metrics(config, console, version, sinks, tracer, start_up, audit)
    stop = StopRequest(deadline_s=config.timeouts.stop_checkpoint_s, progress=metrics.progress)
    return RunContext(config, metrics, stop, tracer, audit)


def checkpoints_of(
    run: RunContext, identity: Mapping[str, Any], learner: Durable, recovery: Recovery, **own: Any
) -> Checkpoints:
    """Returns the checkpoints of a run; `own` are further arguments of `Checkpoints`."""
    config = run.config
    return Checkpoints(
        config.run_folder / CHECKPOINTS_FOLDER,
        learner=learner,
        identity=identity,
        resume_mode=config.resume,
        on_accepted=partial(write_config, config),
        schedule=CheckpointSchedule(config.checkpoints.interval_steps, config.num_steps, config.checkpoints.keep),
        recovery=AuditedRecovery(recovery, run.audit),
        **own,
    )


def replay_buffer(config: RunConfig, tracer: RunTracer = UNTRACED) -> ReplayBuffer:
    # A step's groups take at most all attempts of the slowest prompt, with backoff and reward. Each sampled chunk
    # extends an attempt's deadline, and retries resume after sampled chunks. A chunk of an episode is a turn of at
    # least one token.
    timeouts, supervision, sampler = config.timeouts, config.supervision, config.sampler
    one_try = timeouts.rollout_s + supervision.probe_timeout_s + supervision.no_worker_s
    tries = (config.max_rollout_retries + 1) * one_try
    num_chunks = (sampler.max_tokens - 1) // sampler.chunk_tokens
    if config.environment.is_on:
        num_chunks = config.environment.max_tokens - 1
    num_chunks *= config.algorithm.samples_per_prompt
    return ReplayBuffer(
        journal=build_journal_writer(config),
        max_bytes=config.replay.max_bytes,
        min_ready=config.algorithm.prompts_per_step,
        room_s=config.timeouts.backpressure_s,
        take_s=tries + num_chunks * timeouts.rollout_s + timeouts.reward_s,
        close_s=config.timeouts.stop_s,
        tracer=tracer,
    )


JOURNAL_FOLDER = "journal"  # in the run folder
TRAJECTORIES_FOLDER = "trajectories"  # in the run folder
MAX_WAITING_STEPS = 2  # steps whose groups wait in memory for the trajectory log


def build_journal_writer(config: RunConfig) -> GroupJournal:
    if not config.replay.journal:
        return GroupJournal()
    return JournalWriter(_journal(config), timeout_s=config.timeouts.object_s, write_s=config.timeouts.object_s)


def recovered(config: RunConfig, version: int) -> Recovered:
    """Returns the part of the journal after the checkpoint of `version`.

    If the run was killed during a held-out evaluation, it ends with the evaluated version: the loop trains the next
    step, which was not pushed, again with the same groups, and the version is evaluated before.
    """
    if not config.replay.journal:
        return Recovered(version)
    found = _journal(config).recover(version)
    evaluated = found.reached - 1  # while the last step was trained
    schedule = EvaluationSchedule(config.evaluation.interval_steps, config.num_steps)
    if not found.steps or not schedule.is_due(evaluated) or evaluated in found.evaluations:
        return found
    recorded = {r.step for r in read_records(config.run_folder / METRICS_FILE) if isinstance(r, StepRecord)}
    return found if found.reached in recorded else found.without_last_step()


def trajectory_log(
    run_folder: Path, config: RunConfig, on_written: Callable[[int, Path], None] = lambda step, path: None
) -> TrajectoryLog:
    """Returns the trajectory log of the run in `run_folder`; `on_written` gets each step with its file."""
    return TrajectoryLog(run_folder / TRAJECTORIES_FOLDER, timeout_s=config.timeouts.object_s, on_written=on_written)


def step_learner(run: RunContext, learner: DurableLearner, replay: ReplayBuffer, **options: Any) -> StepLearner:
    """Wraps `learner` with the configured journal and trajectory log; `options` go to `StepLearner`."""
    config = run.config
    return StepLearner(
        learner,
        journal=replay if config.replay.journal else None,
        log=trajectory_log(config.run_folder, config, run.audit.logged) if config.replay.trajectory_log else None,
        max_waiting=MAX_WAITING_STEPS,
        on_log_failed=partial(run.metrics.count, CounterName.UNLOGGED_STEPS),
        seconds=run.metrics.seconds,
        tracer=run.tracer,
        **options,
    )


def build_recovery(
    run: RunContext,
    learner: StepLearner,
    source: PromptSource[Row, Prompt],
    dispatcher: RolloutDispatcher,
    replay: ReplayBuffer,
    on_evaluated: Callable[[int, Mapping[str, Any]], None] = lambda version, evaluation: None,
    after_repeat: AfterRepeat | None = None,
) -> Recovery:
    config = run.config
    if not config.replay.journal:
        return NoRecovery(config.run_folder / JOURNAL_FOLDER)
    return JournalRecovery(
        _journal(config),
        recovered=partial(recovered, config),
        learner=learner,
        groups=LiveGroups(source, ray.put),
        dispatcher=dispatcher,
        replay=replay,
        metrics=run.metrics,
        age_limit=age_limit(config),
        on_recovered=partial(_count_recovered, run.metrics),
        on_evaluated=on_evaluated,
        after_repeat=after_repeat,
    )


def age_limit(config: RunConfig) -> AgeLimit:
    algorithm = config.algorithm
    return AgeLimit(algorithm.max_trained_age, is_whole=algorithm.over_age.action == "drop")


def _count_recovered(metrics: Metrics, counts: Mapping[str, int]) -> None:
    for kind, num in counts.items():
        metrics.count(CounterName.RECOVERED, kind, num)


def _journal(config: RunConfig) -> Journal:
    return Journal(config.run_folder / JOURNAL_FOLDER, journal_identity(config))


def build_guard(run: RunContext, learner: LearnerGroup, on_rollback: Callable[[int], None]) -> RunGuard | None:
    """Returns the configured guard; None if no sign is on. `on_rollback` gets the version of each rollback."""
    config = run.config
    names = guard_signs(config)
    if not names:
        return None
    guard, judges, kl_scale = config.guard, config.rewards.judge_weights, KLScale()
    learner.scale_kl_with(kl_scale)
    is_held_out = config.rewards.judged_interval == 0
    signs: list[Sign] = [DRIFTS[name](getattr(guard.limits, name)) for name in names if name in DRIFTS]
    divergence = [Divergence(guard.min_effect)] if "judge" in names else []
    of_groups = [*signs, *([] if is_held_out else divergence)]
    measured = {q for sign in of_groups for q in sign.quantities} | (
        {Quantity.REWARD, Quantity.JUDGE} if judges else set()
    )
    log = GuardLog(config.run_folder / GUARD_FILE)
    checkpoints = config.run_folder / CHECKPOINTS_FOLDER

    def newest(version: int) -> tuple[int, Path] | None:
        return newest_learner_state(checkpoints, lambda v: v <= version and not built.is_discarded(v))

    rollback = Rollback(learner, newest, max_actions=guard.max_actions)
    actions: dict[str, GuardAction] = {
        "warn": Warn(),
        "raise_kl": RaiseKL(kl_scale, factor=guard.kl_factor, max_actions=guard.max_actions),
        "rollback": rollback,
        "stop": Stop(),
    }
    built = RunGuard(
        watch=Watch(of_groups, Series(guard.window_steps), guard.false_alarm_rate),
        held_out=Watch(divergence, Series(1), guard.false_alarm_rate) if divergence and is_held_out else None,
        observer=Observer(
            quantities=frozenset(measured),
            judge_weights=judges,
            format_components=[c.name for c in config.rewards.components if c.function == "format"],
            num_text_groups=guard.text_groups,
            ngram=guard.repetition_ngram,
            fetch=fetch,
            timeout_s=config.timeouts.object_s,
        ),
        actions={name: actions[guard.action_of(name)] for name in names},
        rollback=rollback,
        log=log,
        kl_scale=kl_scale,
        identity=_identity(config),
        on_event=partial(_count, run),
        on_rollback=on_rollback,
    )
    return built


@dataclass(frozen=True)
class JudgedLog:
    """Implements `ResponseLog`: passes rewards of held-out evaluations to the guard, and responses to another log."""

    guard: RunGuard
    log: ResponseLog

    async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        if suite == HELD_OUT:
            self.guard.evaluated(version, [prompt.scored for prompt in prompts])
        await self.log.write(suite, version, prompts)


def repeat_evaluation(
    evaluator: Evaluator,
    on_result: Callable[[EvaluationResult], None],
    guard: RunGuard | None,
    version: int,
    evaluation: Mapping[str, Any],
) -> None:
    """Takes an evaluation of the journal, as the earlier part of the run took it."""
    for result in evaluator.repeat(evaluation["results"]):
        on_result(result)
    if guard is not None:
        guard.evaluated(version, [[Reward(**reward) for reward in rewards] for rewards in evaluation["rewards"]])


def _identity(config: RunConfig) -> str:
    """Digest of what the guard measures: windows of another reward or size are not compared."""
    measured = [config.rewards.model_dump(mode="json"), config.guard.window_steps, config.guard.repetition_ngram]
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()


def _count(run: RunContext, event: GuardEvent) -> None:
    run.audit.guarded(event)
    run.metrics.count(CounterName.GUARD_ALARMS, event.sign)
    run.metrics.count(CounterName.GUARD_ACTIONS, event.action)
