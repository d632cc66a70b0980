"""The life of a run: prepare, start the cluster, train or evaluate, and leave a summary and a report behind."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from mobula.deploy.host.session import run_record  # isort: skip  (first: sets what ray reads)
from rich.console import Console

from mobula.cluster.audit.chain import SigningKey, signing_key
from mobula.cluster.errors import NothingTrainedError, RunStopped
from mobula.cluster.failures import cause_in_one_line
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.hub import StartUp, informing
from mobula.cluster.metrics.report.run_folder import PLAN_FILE, REPORT_FILE
from mobula.cluster.metrics.sinks.base import Sink
from mobula.cluster.metrics.step_records import best_control, strict
from mobula.cluster.metrics.summary import Status, Summary
from mobula.cluster.recovery.checkpoints import find_resumable
from mobula.cluster.replay.run_identity import changed_settings
from mobula.cluster.rollout.evaluation import EvaluationResult
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.cluster.runtime.placement import inference_roles, needed_roles
from mobula.cluster.runtime.ray_actors import LOGS_FOLDER
from mobula.configs.schema import RunConfig
from mobula.deploy.host.processes import ProcessId
from mobula.deploy.host.run_folder import (
    CHECKPOINTS_FOLDER,
    check_run_folder,
    file_access,
    held_run_folder,
    recorded,
    run_folder,
    written_config,
)
from mobula.deploy.host.terminal import outlive_output, signals_raise, terminal, until_signal
from mobula.deploy.preflight.decisions import with_absolute_paths
from mobula.deploy.preflight.findings import refusing
from mobula.deploy.preloading.preloaded import Preloaded
from mobula.deploy.run.cluster import RunCluster, joined_cluster, write_plan
from mobula.deploy.run.logs import log_thread_failures, log_to, set_up_logging, write_faults_to
from mobula.deploy.run.overview import overview, provenance, reproduction
from mobula.deploy.run.run_report import earlier_wall_s, headline, leave_behind, over_control
from mobula.deploy.wiring.build import build_controller, build_offline_controller, spawn_offline
from mobula.deploy.wiring.evaluation import build_evaluator, response_log
from mobula.deploy.wiring.persistence import RunContext, check_exporters, recovered, run_context
from mobula.deploy.wiring.preparation import Prepared, PreparedRows, identity_with_data, require_model, write_skipped
from mobula.deploy.wiring.roles import (
    Inference,
    Processors,
    rank_statuses,
    scalable_roles,
    spawn_inference,
    spawn_processors,
    spawn_training,
)
from mobula.deploy.wiring.spawner import Spawner, control_loop

T = TypeVar("T")
EVALUATION_FILE = "evaluation.json"
_logger = logging.getLogger(__name__)


def train(config: RunConfig, preloaded: Preloaded | None = None) -> int:
    """Runs the main job from start to report; returns the exit code."""
    outlive_output()
    log_thread_failures()
    console = terminal()
    process = ProcessId.of(os.getpid())
    assert process is not None, "this process has an entry in /proc"
    start_up = StartUp(time.perf_counter() - process.age_s)
    start_up.ended("imports")
    summary = run_training(config, console, start_up=start_up, preloaded=preloaded)
    console.print(f"{headline(config, summary)}; report: {config.run_folder / REPORT_FILE}", soft_wrap=True)
    for warning in summary.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if summary.optimizer_steps == 0:
        raise NothingTrainedError(
            f"{summary.num_steps} steps ran and every one of their optimizer steps was skipped, so the weights are as "
            "they were: look for gradients that are not finite (grad_norm) and for rows without a trained token"
        )
    return 0


def evaluate(config: RunConfig, output: Path | None = None, preloaded: Preloaded | None = None) -> int:
    """Score `policy.model` as it is on every suite of held-out prompts; returns the exit code.

    Results are printed. They are also written to `evaluation.json` in the folder `output`, if one is given, with the
    responses if `evaluation.save_responses` is set.
    """
    require_model(config)
    console = terminal(soft_wrap=True)
    results, seconds = with_engines(config, partial(_evaluate, output), preloaded)
    if output is not None:  # first: the console may be gone
        rows = [strict(asdict(result)) for result in results]
        with file_access(config):
            write_atomically(output / EVALUATION_FILE, json.dumps(rows, indent=2, allow_nan=False) + "\n")
    for result in results:
        best = best_control(result.controls)
        console.print(
            f"{config.policy.model}: {result.suite} {result.measure} {result.accuracy:.3f} ({result.low:.3f} to "
            f"{result.high:.3f}) on {result.record().counted}"
            + "".join(f", {name} {value:.3f}" for name, value in result.values.items())
            + ("" if best is None else f"; {over_control(best)}")
        )
    num = sum(result.num_scored + result.num_unscored for result in results)
    console.print(f"{num / seconds:.2f} responses/s, sampled and scored in {seconds:.1f} s")
    return 0


def with_engines(
    config: RunConfig, work: Callable[[Prepared, Inference], Awaitable[T]], preloaded: Preloaded | None = None
) -> T:
    """Runs `work` with engines of `policy.model` and reward workers on a private cluster; returns its result."""
    start_up = StartUp(time.perf_counter())
    roles = inference_roles(config)
    with file_access(config), signals_raise(), joined_cluster(config, roles, None, start_up, preloaded) as cluster:
        return asyncio.run(until_signal(_serving(cluster, work)))


def run_training(
    config: RunConfig,
    console: Console,
    sinks: Sequence[Sink] = (),
    start_up: StartUp | None = None,
    preloaded: Preloaded | None = None,
) -> Summary:
    """Run the main job to its end, or on from its newest checkpoint; returns what `summary.json` says.

    `sinks` get the run's records in addition to the configured sinks; a step waits until they have taken its record.
    `start_up` has the phases of this process before the call; `preloaded` forks the workers.
    """
    started = time.perf_counter()
    set_up_logging(console)
    config = with_absolute_paths(config)
    check_run_folder(config)
    with signals_raise(), signing_key(config.audit.key_env) as key, held_run_folder(config):
        return _run_training(config, console, sinks, started, start_up or StartUp(started), preloaded, key)


def _run_training(
    config: RunConfig,
    console: Console,
    sinks: Sequence[Sink],
    started: float,
    start_up: StartUp,
    preloaded: Preloaded | None,
    key: SigningKey | None,
) -> Summary:
    checkpoint = find_resumable(config.run_folder / CHECKPOINTS_FOLDER, config.resume, identity_with_data(config))
    check_exporters(config)
    logs = config.run_folder / LOGS_FOLDER
    roles = needed_roles(config)
    with ExitStack() as stack:
        cluster = stack.enter_context(joined_cluster(config, roles, logs, start_up, preloaded, checkpoint))
        config = cluster.prepared.config  # as decided
        version = 0 if checkpoint is None else recovered(config, int(checkpoint.name.removeprefix("step-"))).reached
        changes = changed_settings(written_config(config), config)
        stack.enter_context(run_folder(config))
        stack.enter_context(recorded(run_record(config, cluster.session)))  # `mobula status` finds the run by it
        log_to(config.run_folder)
        process = f"process {os.getpid()} on {socket.gethostname()}"
        _logger.info("run %s starts at version %d: %s", config.name, version, process)
        if changes and version:
            named = ", ".join(f"{key}={now} (was {was})" for key, (was, now) in changes.items())
            _logger.warning("the run learns otherwise from version %d on: %s", version, named)
        _logger.info("this run:\n%s", overview(cluster.prepared, cluster.plan, version))
        with informing(f"the plan of run {config.name}"):
            write_skipped(config.run_folder, cluster.prepared.skipped)
            write_plan(config.run_folder / PLAN_FILE, cluster.plan)
        run = run_context(config, console, version, sinks, start_up, key)
        metrics, audit = run.metrics, run.audit
        origin = provenance(cluster.prepared)
        audit.started(origin | reproduction(config, origin))
        write_faults_to(config.run_folder, metrics.progress, audit.lost)
        # A part that was killed has left no summary, but the seconds of its steps.
        started -= max(earlier_wall_s(config.run_folder), metrics.totals.seconds["total"]) if version else 0.0
        status: Status = "failed"
        cause = ""
        try:
            asyncio.run(until_signal(_train(cluster, run), run.stop.request))
            status = "done"
        except (asyncio.CancelledError, RunStopped):
            status = "stopped"
            raise KeyboardInterrupt from None
        except Exception as error:
            cause = cause_in_one_line(error)
            raise
        finally:
            metrics.close()
            with informing("the last traces"):
                run.tracer.close()
            summary = leave_behind(cluster.prepared, metrics, status, time.perf_counter() - started, cause)
            with informing("the audit"):
                audit.ended(status, summary.version)
            _logger.info(
                "run %s is %s at version %d after %.0f s", config.name, status, summary.version, summary.wall_s
            )
    return summary


async def _train(cluster: RunCluster, run: RunContext) -> None:
    async with cluster.spawner() as spawner:
        checked = cluster.prepared
        if isinstance(checked, Prepared):
            await _train_on_rollouts(*spawn_processors(checked, spawner, run.lost), spawner, run)
        else:
            await _train_on_rows(*spawn_processors(checked, spawner, run.lost), spawner, run)


async def _train_on_rows(prepared: PreparedRows, processors: Processors, spawner: Spawner, run: RunContext) -> None:
    training = spawn_offline(prepared, spawner, run, processors.watched)
    ranks = partial(rank_statuses, training.learner)
    roles = {**training.scalable, **processors.scalable}
    async with control_loop(run, spawner, roles, None, training.rows, ranks).running():
        with refusing():
            await run_all(run.metrics.start_up.timing("learner", training.learner.start()), processors.start())
        controller = await asyncio.to_thread(build_offline_controller, prepared, training, run)
        tune_gc()
        await controller.run()


async def _train_on_rollouts(prepared: Prepared, processors: Processors, spawner: Spawner, run: RunContext) -> None:
    training = spawn_training(prepared, spawner, run)
    inference = spawn_inference(prepared, spawner, run.lost)
    roles = {**scalable_roles(inference, training), **processors.scalable}
    in_flight, ranks = inference.in_flight_requests, partial(rank_statuses, training.learner)
    control, timing = control_loop(run, spawner, roles, in_flight, training.replay, ranks), run.metrics.start_up.timing
    try:
        async with control.running():
            with refusing():
                await run_all(
                    timing("learner", training.learner.start()),
                    timing("engines", inference.rollouts.start()),
                    timing("scorers", inference.rewards.start()),
                    processors.start(),
                )
            controller = await asyncio.to_thread(
                build_controller, prepared, inference, training, run, processors.watched
            )
            tune_gc()
            await controller.run()
    finally:
        await training.replay.close()


async def _evaluate(
    output: Path | None, prepared: Prepared, inference: Inference
) -> tuple[list[EvaluationResult], float]:
    roles = (inference.rollouts, inference.rewards)
    responses = response_log(prepared, output)
    evaluator = await asyncio.to_thread(build_evaluator, prepared, *roles, lambda result: None, responses)
    started = time.perf_counter()
    return await evaluator.run(0), time.perf_counter() - started


async def _serving(cluster: RunCluster, work: Callable[[Prepared, Inference], Awaitable[T]]) -> T:
    async with cluster.spawner() as spawner:
        assert isinstance(cluster.prepared, Prepared), "offline jobs have no engines"
        prepared, processors = spawn_processors(cluster.prepared, spawner, on_lost=lambda kind: None)
        inference = spawn_inference(prepared, spawner, on_lost=lambda kind: None)
        rollouts = inference.rollouts
        rollouts.admit_with(lambda engine: engine.weight_version())  # it serves the checkpoint that it was started with
        await run_all(rollouts.start(), inference.rewards.start(), processors.start())
        tune_gc()
        async with rollouts.tended():
            return await work(prepared, inference)
