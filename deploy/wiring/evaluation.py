"""Wiring of held-out evaluation: suites, responses on disk, and records of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord
from mobula.cluster.roles import Rewards, Rollouts, SamplingSettings
from mobula.cluster.rollout.contact_sheets import ContactSheets
from mobula.cluster.rollout.evaluation import (
    EvaluationJournal,
    EvaluationResult,
    EvaluationSchedule,
    Evaluator,
    NoResponseLog,
    ResponseLog,
    Suite,
)
from mobula.cluster.rollout.response_files import ResponseFiles
from mobula.deploy.wiring.preparation import Prepared

RESPONSES_FOLDER = "evaluations"  # in the run folder
AFTER_TRAINING = 1  # priority of held-out prompts


def build_evaluator(
    prepared: Prepared,
    rollouts: Rollouts,
    rewards: Rewards,
    on_result: Callable[[EvaluationResult], None],
    responses: ResponseLog,
    journal: EvaluationJournal | None = None,
) -> Evaluator:
    """Builds held-out evaluation on the run's rollout actors."""
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
        journal=journal,
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
    yield Suite(HELD_OUT, prepared.fixed_prompts(evaluation.split, evaluation.num_prompts).prompts, own)
    for name, suite in evaluation.suites.items():
        prompts = prepared.fixed_prompts(suite.split, suite.num_prompts).prompts
        settings = replace(own, num_samples=suite.num_samples, temperature=suite.temperature, top_p=suite.top_p)
        yield Suite(name, [replace(prompt, prompt_id=f"{name}:{prompt.prompt_id}") for prompt in prompts], settings)


def response_log(prepared: Prepared, folder: Path | None) -> ResponseLog:
    """Returns the log of responses in `folder`: images of a flow model; texts of other models, if configured."""
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
    if metrics.totals.has_evaluation(result.version, result.suite):
        return
    metrics.record_evaluation(
        EvaluationRecord(
            result.version, result.accuracy, result.low, result.high, result.num_scored, result.suite, result.values
        )
    )
