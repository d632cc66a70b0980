"""Wiring of held-out evaluation and of the guard against reward hacking."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mobula.cluster.guard.guard import GuardAction, KLScale, RaiseKL, Rollback, RunGuard, Stop, Warn, Watch
from mobula.cluster.guard.signs import DRIFTS, Divergence, Observer, Quantity, Series, Sign
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.guard_events import GUARD_FILE, GuardEvent, GuardLog
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import CONTENT, HELD_OUT
from mobula.cluster.records.trajectory import Prompt, Reward
from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.cluster.replay.journal_writer import GroupJournal
from mobula.cluster.roles import Rewards, Rollouts, SamplingSettings
from mobula.cluster.rollout.evaluation import (
    ContactSheets,
    EvaluationResult,
    EvaluationSchedule,
    Evaluator,
    NoResponseLog,
    ResponseFiles,
    ResponseLog,
    ScoredPrompt,
    Suite,
)
from mobula.cluster.runtime.object_store import fetch
from mobula.configs.rules.run import guard_signs
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER
from mobula.deploy.wiring.persistence import RunContext
from mobula.deploy.wiring.preparation import Prepared
from mobula.learner.learner_group import LearnerGroup

RESPONSES_FOLDER = "evaluations"  # in the run folder
AFTER_TRAINING = 1  # priority of held-out prompts


def build_evaluator(
    prepared: Prepared,
    rollouts: Rollouts,
    rewards: Rewards,
    on_result: Callable[[EvaluationResult], None],
    responses: ResponseLog,
    journal: GroupJournal | None = None,
) -> Evaluator:
    config = prepared.config
    return Evaluator(
        suites=list(_suites(prepared)),
        rollouts=rollouts,
        rewards=rewards,
        accuracy_component=config.rewards.accuracy_component,
        correct_from=config.evaluation.correct_from,
        max_concurrent=config.algorithm.max_concurrent_groups * config.algorithm.samples_per_prompt,
        schedule=EvaluationSchedule(config.evaluation.interval_steps, config.num_steps),
        on_result=on_result,
        responses=responses,
        journal=journal or GroupJournal(),
    )


def _suites(prepared: Prepared) -> Iterator[Suite]:
    """Yields the run's own suite, then the others by name. Prompt ids are unique across the suites of a run."""
    evaluation, sampler = prepared.config.evaluation, prepared.config.sampler
    own = SamplingSettings(
        num_samples=evaluation.num_samples,
        temperature=evaluation.temperature,
        max_tokens=sampler.max_tokens,
        seed=prepared.config.seed,
        priority=AFTER_TRAINING,
        stop_strings=sampler.stop_strings,
    )
    held_out = prepared.fixed_prompts(evaluation.split, evaluation.num_prompts).prompts
    yield Suite(HELD_OUT, held_out, own, identity_of(prepared.config, evaluation.split, held_out, own))
    for name, suite in evaluation.suites.items():
        prompts = prepared.fixed_prompts(suite.split, suite.num_prompts).prompts
        settings = replace(own, num_samples=suite.num_samples, temperature=suite.temperature, top_p=suite.top_p)
        identity = identity_of(prepared.config, suite.split, prompts, settings)
        own_ids = [replace(prompt, prompt_id=f"{name}:{prompt.prompt_id}") for prompt in prompts]
        yield Suite(name, own_ids, settings, identity)


def identity_of(
    config: RunConfig, split: str, prompts: Sequence[Prompt], settings: SamplingSettings
) -> dict[str, str | int | float]:
    """Returns what the numbers of a suite depend on, apart from weights and seeds; digests begin with `CONTENT`."""
    environment, rewards, sampler = config.environment, config.rewards, config.sampler
    judged = {component.name: (component.function, component.options) for component in rewards.components}
    recipes = {label: recipe.model_dump(exclude={"weights", "normalise"}) for label, recipe in rewards.recipes.items()}
    training = {"batch_size", "window_start", "window_end", "window_size", "window_order", "window_interval"}
    used = {
        "environment": [environment.name, environment.options, environment.max_tokens] if environment.is_on else None,
        "denoising": sampler.flow.model_dump(exclude=training) if sampler.is_flow else None,
        "guidance": sampler.image_tokens.guidance if sampler.draws_tokens else None,
    }
    return {
        "split": split,
        "num_prompts": len(prompts),
        "num_samples": settings.num_samples,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "stop_strings": " ".join(map(repr, settings.stop_strings)),
        "correct_from": config.evaluation.correct_from,
        "rows": content_of([(p.references, [m.key for m in p.media], p.metadata) for p in prompts]),
        "prompts": content_of([prompt.text for prompt in prompts]),
        "rewards": content_of([rewards.accuracy_component, judged, recipes]),
        **{name: content_of(value) for name, value in used.items() if value is not None},
    }


def content_of(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return CONTENT + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def response_log(prepared: Prepared, folder: Path | None) -> ResponseLog:
    config = prepared.config
    if folder is not None and config.sampler.is_flow:
        return ContactSheets(folder, timeout_s=config.timeouts.object_s)
    if folder is None or not config.evaluation.save_responses:
        return NoResponseLog()
    return ResponseFiles(
        folder,
        accuracy_component=config.rewards.accuracy_component,
        correct_from=config.evaluation.correct_from,
        timeout_s=config.timeouts.object_s,
    )


def record_evaluation(metrics: Metrics, result: EvaluationResult) -> None:
    """Records a result, unless the run recorded it after the checkpoint from which it was resumed."""
    record = result.record()
    if not metrics.totals.has_evaluation(record):
        metrics.record_evaluation(record)


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
