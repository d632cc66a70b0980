"""Builds the evaluations of a run: suites, controls, and the logs of responses."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mobula.actors.datasets.prompts import InDriver, fixed_prompts, position_of
from mobula.actors.datasets.rows import Split
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.worker import make_processor
from mobula.actors.rollout.controls import controlled
from mobula.cluster.errors import DatasetError
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.report.samples import write_rows
from mobula.cluster.metrics.step_records import CONTENT, HELD_OUT
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.replay.journal_writer import GroupJournal
from mobula.cluster.roles import Rewards, Rollouts, SamplingSettings
from mobula.cluster.rollout.evaluation import (
    EvaluationResult,
    EvaluationSchedule,
    Evaluator,
    KeptResults,
    NoResponseLog,
    NothingKept,
    ResponseLog,
    ResultFiles,
    Suite,
    values_by_row,
)
from mobula.cluster.rollout.response_logs import ContactSheets, FirstAnswers, ResponseFiles
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.configs.schema.data import BOXED_SUFFIX
from mobula.configs.schema.run import Control
from mobula.deploy.wiring.preparation import Prepared, weights_digest

KEPT_FOLDER = ".evaluations"  # in the folder of the runs
RESPONSES_FOLDER = "evaluations"  # in the run folder
AFTER_TRAINING = 1  # priority of held-out prompts

_logger = logging.getLogger(__name__)


def build_evaluator(
    prepared: Prepared,
    rollouts: Rollouts,
    rewards: Rewards,
    on_result: Callable[[EvaluationResult], None],
    responses: ResponseLog,
    journal: GroupJournal | None = None,
) -> Evaluator:
    config = prepared.config
    suites = list(_suites(prepared))
    return Evaluator(
        suites=suites,
        rollouts=rollouts,
        rewards=rewards,
        accuracy_component=config.rewards.accuracy_component,
        own_measure=config.rewards.own_measure,
        correct_from=config.evaluation.correct_from,
        max_concurrent=config.algorithm.max_concurrent_groups * config.algorithm.samples_per_prompt,
        schedule=EvaluationSchedule(config.evaluation.interval_steps, config.num_steps),
        on_result=on_result,
        responses=responses,
        journal=journal or GroupJournal(),
        kept=_kept_results(prepared, suites),
    )


def _kept_results(prepared: Prepared, suites: Sequence[Suite]) -> KeptResults:
    """Results of controls before training; those after a warm start are of this run alone."""
    config = prepared.config
    if config.warm_start.num_steps or not any(suite.control for suite in suites):
        return NothingKept()
    weights = weights_digest(prepared.model_folder)
    engine = [config.sampler.kind, config.resources.dtype, config.resources.device]
    return ResultFiles(config.folder / KEPT_FOLDER, [weights, *engine])


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
    yield from _controls(prepared, HELD_OUT, evaluation.split, held_out, own)
    for name, suite in evaluation.suites.items():
        prompts = prepared.fixed_prompts(suite.split, suite.num_prompts).prompts
        settings = replace(own, num_samples=suite.num_samples, temperature=suite.temperature, top_p=suite.top_p)
        identity = identity_of(prepared.config, suite.split, prompts, settings)
        own_ids = [replace(prompt, prompt_id=f"{name}:{prompt.prompt_id}") for prompt in prompts]
        yield Suite(name, own_ids, settings, identity)
        yield from _controls(prepared, name, suite.split, prompts, settings)


def _controls(
    prepared: Prepared, of: str, split: str, prompts: Sequence[Prompt], settings: SamplingSettings
) -> Iterator[Suite]:
    """Yields the controls of a suite, which have prompts of the same rows. A control without prompts is left out: of
    rows without media, of media that no other row differs in, or of a family that needs them."""
    config, processor = prepared.config, prepared.processor
    chosen = prompts[: config.evaluation.max_control_prompts]
    if not isinstance(processor, ChatProcessor):
        return
    rows = [prepared.splits[split].rows[position_of(prompt)] for prompt in chosen]
    original = {prompt.sample_id: prompt.prompt_id for prompt in chosen}
    for control in config.evaluation.controls:
        name, preparation = f"{of}.{control}", prepared.preparation
        if control is Control.DIRECT_PROMPT:
            preparation = InDriver(make_processor(_asked_directly(config), prepared.media))  # type: ignore[arg-type]
        try:
            shown = controlled(control, rows, processor, seed=config.seed)
            made = fixed_prompts(Split(name, shown, ()), preparation, len(shown)).prompts
        except DatasetError as error:
            _logger.info("evaluation.controls: %s is left out: %s", name, error)
            continue
        own = [replace(prompt, prompt_id=f"{name}:{original[prompt.sample_id]}") for prompt in made]
        identity = identity_of(config, split, own, settings) | {"control": str(control)}
        yield Suite(name, own, settings, identity, of, control)


def _asked_directly(config: RunConfig) -> RunConfig:
    """The configuration whose processor asks for the answer alone, in the form that the reward reads."""
    suffix = f" {config.evaluation.direct_prompt}{BOXED_SUFFIX if config.rewards.reads_box else ''}"
    data = config.data.model_copy(update={"system_prompt": "", "prompt_suffix": suffix})
    return config.model_copy(update={"data": data})


def identity_of(
    config: RunConfig, split: str, prompts: Sequence[Prompt], settings: SamplingSettings
) -> dict[str, str | int | float]:
    """Returns what the numbers of a suite depend on, apart from weights and seeds; digests begin with `CONTENT`."""
    environment, rewards, sampler = config.environment, config.rewards, config.sampler
    judged = {component.name: (component.function, component.options) for component in rewards.components}
    recipes = {label: recipe.model_dump(exclude={"weights", "normalise"}) for label, recipe in rewards.recipes.items()}
    training = {"batch_size", "window_start", "window_end", "window_size", "window_order", "window_interval"}
    used = {
        "environment": [environment.name, environment.arguments, environment.max_tokens] if environment.is_on else None,
        "denoising": sampler.flow.model_dump(exclude=training) if sampler.denoises else None,
        "patches": sampler.image_patches.model_dump() if sampler.draws_patches else None,
        "guidance": sampler.image_tokens.guidance if sampler.kind is SamplerKind.IMAGE_TOKENS else None,
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


def response_log(prepared: Prepared, folder: Path | None, *, is_reported: bool = False) -> ResponseLog:
    """The log of responses in `folder`; with `is_reported`, the report's answers are written as well."""
    config = prepared.config
    if folder is not None and config.sampler.denoises:
        return ContactSheets(folder, timeout_s=config.timeouts.object_s)
    if folder is None:
        return NoResponseLog()
    log: ResponseLog = NoResponseLog()
    if config.evaluation.save_responses:
        log = ResponseFiles(
            folder,
            accuracy_component=config.rewards.accuracy_component,
            correct_from=config.evaluation.correct_from,
            timeout_s=config.timeouts.object_s,
        )
    return FirstAnswers(log, folder, config.timeouts.object_s) if is_reported else log


def record_evaluation(metrics: Metrics, folder: Path, component: str, result: EvaluationResult) -> None:
    """Records a result, unless the run recorded it after the checkpoint from which it was resumed; writes its rows to
    `folder`, for `mobula compare`."""
    record = result.record()
    if rows := values_by_row(result, component):
        write_rows(folder, result.suite, result.version, rows)
    if not metrics.totals.has_evaluation(record):
        metrics.record_evaluation(record)
