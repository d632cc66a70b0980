"""Builds the persistence of steps: journal, trajectory log and recovery."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray

from mobula.actors.datasets.prompts import PromptSource
from mobula.actors.datasets.rows import Row
from mobula.cluster.audit.observer import RunAudit
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.report.run_folder import METRICS_FILE
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.recovery.checkpoints import Recovery
from mobula.cluster.recovery.restartable_learner import RestartableLearner
from mobula.cluster.recovery.resume import AfterRepeat, JournalRecovery, NoRecovery
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal, Recovered, journal_identity
from mobula.cluster.replay.journal_writer import GroupJournal, JournalWriter, NoJournal
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.cluster.rollout.dispatcher import RolloutDispatcher
from mobula.cluster.rollout.evaluation import EvaluationSchedule
from mobula.cluster.rollout.staleness import AgeLimit
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer
from mobula.configs.schema import RunConfig


def replay_buffer(config: RunConfig, tracer: RunTracer = UNTRACED) -> ReplayBuffer:
    """Returns the replay buffer with its journal writer."""
    return ReplayBuffer(
        journal=build_journal_writer(config),
        max_bytes=config.replay.max_bytes,
        min_ready=config.algorithm.prompts_per_step,
        room_s=config.timeouts.backpressure_s,
        take_s=_take_deadline(config),
        close_s=config.timeouts.stop_s,
        tracer=tracer,
    )


def _take_deadline(config: RunConfig) -> float:
    """Returns the maximum time for a step's groups: all attempts of the slowest prompt, with backoff and reward.

    Each sampled chunk extends an attempt's deadline, and retries resume after sampled chunks. A chunk of an episode is
    a turn of at least one token.
    """
    timeouts, supervision, sampler = config.timeouts, config.supervision, config.sampler
    one_try = timeouts.rollout_s + supervision.probe_timeout_s + supervision.no_worker_s
    tries = (config.max_rollout_retries + 1) * one_try
    num_chunks = (sampler.max_tokens - 1) // sampler.chunk_tokens
    if config.environment.is_on:
        num_chunks = config.environment.max_tokens - 1
    num_chunks *= config.algorithm.samples_per_prompt
    return tries + num_chunks * timeouts.rollout_s + timeouts.reward_s


JOURNAL_FOLDER = "journal"  # in the run folder
TRAJECTORIES_FOLDER = "trajectories"  # in the run folder
MAX_WAITING_STEPS = 2  # steps whose groups wait in memory for the trajectory log


def build_journal_writer(config: RunConfig) -> GroupJournal:
    """Returns the journal writer of the replay buffer."""
    if not config.replay.journal:
        return NoJournal()
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


def step_learner(
    config: RunConfig,
    learner: RestartableLearner,
    replay: ReplayBuffer,
    metrics: Metrics,
    audit: RunAudit,
    **options: Any,
) -> StepLearner:
    """Wraps `learner` with the configured journal and trajectory log; `options` go to `StepLearner`."""
    return StepLearner(
        learner,
        journal=replay if config.replay.journal else None,
        log=trajectory_log(config.run_folder, config, audit.logged) if config.replay.trajectory_log else None,
        max_waiting=MAX_WAITING_STEPS,
        on_log_failed=partial(metrics.count, CounterName.UNLOGGED_STEPS),
        seconds=metrics.seconds,
        **options,
    )


def build_recovery(
    config: RunConfig,
    learner: StepLearner,
    source: PromptSource[Row, Prompt],
    dispatcher: RolloutDispatcher,
    replay: ReplayBuffer,
    metrics: Metrics,
    on_evaluated: Callable[[int, Mapping[str, Any]], None] = lambda version, evaluation: None,
    after_repeat: AfterRepeat | None = None,
) -> Recovery:
    """Returns the configured recovery from the journal."""
    if not config.replay.journal:
        return NoRecovery(config.run_folder / JOURNAL_FOLDER)
    return JournalRecovery(
        _journal(config),
        recovered=partial(recovered, config),
        learner=learner,
        groups=LiveGroups(source, ray.put),
        dispatcher=dispatcher,
        replay=replay,
        metrics=metrics,
        age_limit=age_limit(config),
        on_recovered=partial(_count_recovered, metrics),
        on_evaluated=on_evaluated,
        after_repeat=after_repeat,
    )


def age_limit(config: RunConfig) -> AgeLimit:
    """Returns the maximum age of groups for training."""
    algorithm = config.algorithm
    return AgeLimit(algorithm.max_trained_age, is_whole=algorithm.over_age.action == "drop")


def _count_recovered(metrics: Metrics, counts: Mapping[str, int]) -> None:
    for kind, num in counts.items():
        metrics.count(CounterName.RECOVERED, kind, num)


def _journal(config: RunConfig) -> Journal:
    return Journal(config.run_folder / JOURNAL_FOLDER, journal_identity(config))
