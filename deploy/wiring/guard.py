"""Wiring of the guard against reward hacking."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mobula.cluster.audit.observer import RunAudit
from mobula.cluster.guard.guard import GuardAction, KLScale, RaiseKL, Rollback, RunGuard, Stop, Warn, Watch
from mobula.cluster.guard.signs import DRIFTS, Divergence, Observer, Quantity, Series, Sign
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.guard_events import GUARD_FILE, GuardEvent, GuardLog
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import HELD_OUT
from mobula.cluster.records.trajectory import Reward
from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.cluster.recovery.restartable_learner import RestartableLearner
from mobula.cluster.rollout.evaluation import EvaluationResult, Evaluator, ResponseLog, ScoredPrompt
from mobula.cluster.runtime.object_store import fetch
from mobula.configs.rules.run import guard_signs
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER
from mobula.learner.learner_group import LearnerGroup


def build_guard(
    config: RunConfig,
    ranks: LearnerGroup,
    learner: RestartableLearner,
    metrics: Metrics,
    audit: RunAudit,
    on_rollback: Callable[[int], None],
) -> RunGuard | None:
    """Returns the configured guard; None if no sign is on. `on_rollback` gets the version of each rollback."""
    names = guard_signs(config)
    if not names:
        return None
    guard, judges, kl_scale = config.guard, config.rewards.judge_weights, KLScale()
    ranks.scale_kl_with(kl_scale)
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
        on_event=partial(_count, metrics, audit),
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


def judged_log(guard: RunGuard | None, log: ResponseLog) -> ResponseLog:
    """Returns `log`, with the guard before it if there is one."""
    return log if guard is None else JudgedLog(guard, log)


def _identity(config: RunConfig) -> str:
    """Digest of what the guard measures: windows of another reward or size are not compared."""
    measured = [config.rewards.model_dump(mode="json"), config.guard.window_steps, config.guard.repetition_ngram]
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()


def _count(metrics: Metrics, audit: RunAudit, event: GuardEvent) -> None:
    audit.guarded(event)
    metrics.count(CounterName.GUARD_ALARMS, event.sign)
    metrics.count(CounterName.GUARD_ACTIONS, event.action)
