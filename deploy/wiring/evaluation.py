"""Wiring of held-out evaluation: suites, responses on disk, and records of results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import CONTENT, HELD_OUT
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import Rewards, Rollouts, SamplingSettings
from mobula.cluster.rollout.evaluation import (
    EvaluationJournal,
    EvaluationResult,
    EvaluationSchedule,
    Evaluator,
    NoResponseLog,
    ResponseLog,
    Suite,
)
from mobula.cluster.rollout.response_files import ContactSheets, ResponseFiles
from mobula.configs.schema import RunConfig
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
    """Returns the digest of a value for an identity."""
    text = json.dumps(value, sort_keys=True, default=str)
    return CONTENT + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


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
    record = result.record()
    if not metrics.totals.has_evaluation(record):
        metrics.record_evaluation(record)
