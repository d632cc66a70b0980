"""The life of a run: prepare, start the cluster, train or evaluate, and leave a summary and a report behind."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mobula.deploy.host.session import ClusterSession, check_access, expected_nodes, ray_session, run_record  # isort: skip  (first: sets what ray reads)
import ray
from rich.console import Console

from mobula.actors.datasets.rows import count_by_reason
from mobula.cluster.audit.chain import SigningKey, signing_key
from mobula.cluster.audit.observer import RunAudit
from mobula.cluster.errors import NothingTrainedError, PreflightError, RunStopped
from mobula.cluster.failures import cause_in_one_line
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import Metrics, StartUp, informing
from mobula.cluster.metrics.report.run_folder import PLAN_FILE, REPORT_FILE, SUMMARY_FILE
from mobula.cluster.metrics.sinks.base import Sink
from mobula.cluster.metrics.sinks.trackers import refuse_missing
from mobula.cluster.metrics.step_records import strict
from mobula.cluster.metrics.summary import RunFacts, Status, Summary, summarize, write_summary
from mobula.cluster.recovery.checkpoints import find_resumable, refuse_other_run
from mobula.cluster.recovery.stop_request import StopRequest
from mobula.cluster.replay.run_identity import changed_settings
from mobula.cluster.rollout.evaluation import EvaluationResult
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.cluster.runtime.placement import PlacementPlan, inference_roles, needed_roles, plan_placement
from mobula.cluster.runtime.placement_groups import create_placement_groups, plan_when_free
from mobula.cluster.runtime.ray_actors import LOGS_FOLDER
from mobula.cluster.tracing.tracer import RunTracer, build_tracer, refuse_missing_exporter
from mobula.configs.schema import RunConfig
from mobula.deploy.host.cuda import examine_apart, refuse_flaws
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
from mobula.deploy.host.terminal import ending_signals, ignore_signals, outlive_output, signals_raise, terminal
from mobula.deploy.planning.clusters import joined_nodes, this_node
from mobula.deploy.planning.plan_command import planned_engine, refuse_too_small_cache
from mobula.deploy.preflight.decisions import with_absolute_paths
from mobula.deploy.preflight.engine_build import check_engine_build
from mobula.deploy.preloading.preloaded import Preloaded
from mobula.deploy.report.report import write_report
from mobula.deploy.run.logs import log_thread_failures, log_to, set_up_logging, write_faults_to
from mobula.deploy.run.node_network import check_network, check_on_all_nodes
from mobula.deploy.run.overview import overview
from mobula.deploy.run.provenance import provenance, reproduction
from mobula.deploy.run.run_report import earlier_wall_s, headline
from mobula.deploy.wiring.build import (
    Inference,
    build_controller,
    rank_statuses,
    scalable_roles,
    spawn_inference,
    spawn_training,
)
from mobula.deploy.wiring.data_files import identity_with_data
from mobula.deploy.wiring.evaluation import build_evaluator, response_log
from mobula.deploy.wiring.observers import build_audit, build_metrics
from mobula.deploy.wiring.offline import build_offline_controller, spawn_offline
from mobula.deploy.wiring.persistence import recovered
from mobula.deploy.wiring.pooled_roles import control_loop, spawn_processors
from mobula.deploy.wiring.preparation import (
    TRAIN,
    AnyPrepared,
    Prepared,
    PreparedRows,
    prepare,
    require_model,
    write_skipped,
)
from mobula.deploy.wiring.spawner import Spawner

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
    console.print(
        f"{headline(config, summary)}; report: {config.run_folder / REPORT_FILE}", markup=False, soft_wrap=True
    )
    for warning in summary.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
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
        console.print(
            f"{config.policy.model}: {result.suite} accuracy {result.accuracy:.3f} ({result.low:.3f} to "
            f"{result.high:.3f}) on {result.record().counted}"
            + "".join(f", {name} {value:.3f}" for name, value in result.values.items()),
            markup=False,
            highlight=False,
        )
    num = sum(result.num_scored + result.num_unscored for result in results)
    console.print(f"{num / seconds:.2f} responses/s, sampled and scored in {seconds:.1f} s", highlight=False)
    return 0


def with_engines(
    config: RunConfig, work: Callable[[Prepared, Inference], Awaitable[T]], preloaded: Preloaded | None = None
) -> T:
    """Runs `work` with engines of `policy.model` and reward workers on a private cluster; returns its result."""
    start_up = StartUp(time.perf_counter())
    roles = inference_roles(config)
    with file_access(config), signals_raise(), _cluster(config, roles, None, start_up, preloaded) as cluster:
        return asyncio.run(_until_signal(_serving(cluster, work)))


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
    refuse_missing(config.metrics.trackers)
    refuse_missing_exporter(config.tracing)
    logs = config.run_folder / LOGS_FOLDER
    roles = needed_roles(config)
    with ExitStack() as stack:
        cluster = stack.enter_context(_cluster(config, roles, logs, start_up, preloaded, checkpoint))
        config = cluster.prepared.config  # as decided
        version = 0 if checkpoint is None else recovered(config, int(checkpoint.name.removeprefix("step-"))).reached
        changes = changed_settings(written_config(config), config)
        stack.enter_context(run_folder(config))
        stack.enter_context(_findable(cluster))
        log_to(config.run_folder)
        process = f"process {os.getpid()} on {socket.gethostname()}"
        _logger.info("run %s starts at version %d: %s", config.name, version, process)
        if changes and version:
            named = ", ".join(f"{key}={now} (was {was})" for key, (was, now) in changes.items())
            _logger.warning("the run learns otherwise from version %d on: %s", version, named)
        _logger.info("this run:\n%s", overview(cluster.prepared, cluster.plan, version))
        with informing(f"the plan of run {config.name}"):
            write_skipped(config.run_folder, cluster.prepared.skipped)
            _write_plan(config.run_folder / PLAN_FILE, cluster.plan)
        tracer = build_tracer(config.tracing, config.name, config.run_folder)
        audit = build_audit(config, key)
        metrics = build_metrics(config, console, version, sinks, tracer, start_up, audit)
        origin = provenance(cluster.prepared)
        audit.started(origin | reproduction(config, origin))
        write_faults_to(config.run_folder, metrics.progress, audit.lost)
        # A part that was killed has left no summary, but the seconds of its steps.
        started -= max(earlier_wall_s(config.run_folder), metrics.totals.seconds["total"]) if version else 0.0
        status: Status = "failed"
        cause = ""
        stop_request = StopRequest(deadline_s=config.timeouts.stop_checkpoint_s, progress=metrics.progress)
        try:
            asyncio.run(_until_signal(_train(cluster, metrics, tracer, stop_request, audit), stop_request.request))
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
                tracer.close()
            summary = _leave_behind(cluster.prepared, metrics, status, time.perf_counter() - started, cause)
            with informing("the audit"):
                audit.ended(status, summary.version)
            _logger.info(
                "run %s is %s at version %d after %.0f s", config.name, status, summary.version, summary.wall_s
            )
    return summary


@dataclass(frozen=True)
class _Cluster:
    """A connected cluster with the plan and the parts of the run on it."""

    prepared: AnyPrepared
    session: ClusterSession
    plan: PlacementPlan
    logs: Path | None  # the folder of the workers' logs; None where there is no run folder
    preloaded: Preloaded | None

    @asynccontextmanager
    async def spawner(self) -> AsyncIterator[Spawner]:
        """Reserves the plan's resources while the body runs."""
        config = self.prepared.config
        bookings = await asyncio.to_thread(
            create_placement_groups, self.plan, run_name=config.name, timeout_s=config.timeouts.start_s
        )
        spawner = Spawner(config, self.session, self.plan, bookings, self.logs, self.preloaded)
        try:
            yield spawner
        finally:
            await asyncio.to_thread(spawner.close)


def _findable(cluster: _Cluster) -> AbstractContextManager[None]:
    """While the body runs, `mobula status` and its like find the run by its folder."""
    return recorded(run_record(cluster.prepared.config, cluster.session))


@contextmanager
def _cluster(
    config: RunConfig,
    roles: tuple[str, ...],
    logs: Path | None,
    start_up: StartUp,
    preloaded: Preloaded | None,
    checkpoint: Path | None = None,
) -> Iterator[_Cluster]:
    """Runs every check that needs no cluster and checks access to it, then joins or starts Ray.

    `checkpoint` is the checkpoint to resume from.
    """
    check_access(config)
    if "rollout" in roles:
        refuse_too_small_cache(config)
    nodes, engine = expected_nodes(config), None
    if nodes is not None:
        plan_placement(config.resources, nodes, roles)
        if config.resources.device == "cuda":
            refuse_flaws({"this machine": examine_apart()})
        check_engine_build(config, roles)
        engine = planned_engine(config, (this_node(config.resources),), roles)
    prepared = prepare(config, ray.put)
    if checkpoint is not None:
        refuse_other_run(checkpoint, prepared.identity)
    start_up.ended("checks")
    with ray_session(config) as session:
        plan = plan_when_free(config.resources, roles, wait_s=config.timeouts.stop_s)
        if nodes is None:
            check_on_all_nodes(config)
            check_network(plan)
            joined = joined_nodes()
            used = {worker.node_id: worker.node_name for worker in plan.workers if worker.num_gpus}
            refuse_flaws({used[n.node_id]: n.cuda for n in joined if n.cuda and n.node_id in used})
            engine = planned_engine(config, joined, roles)
        start_up.ended("Ray")
        yield _Cluster(replace(prepared, engine=engine), session, plan, logs, preloaded)


async def _train(
    cluster: _Cluster, metrics: Metrics, tracer: RunTracer, stop_request: StopRequest, audit: RunAudit
) -> None:
    """RL on rollouts, or an offline job on rows."""
    if isinstance(cluster.prepared, Prepared):
        await _train_on_rollouts(cluster, cluster.prepared, metrics, tracer, stop_request, audit)
    else:
        await _train_on_rows(cluster, cluster.prepared, metrics, stop_request, audit)


async def _train_on_rows(
    cluster: _Cluster, checked: PreparedRows, metrics: Metrics, stop_request: StopRequest, audit: RunAudit
) -> None:
    async with cluster.spawner() as spawner:
        on_lost = partial(metrics.count, CounterName.RESTARTS)
        on_rescore = partial(metrics.count, CounterName.REFERENCE_RETRIES)
        prepared, processors = spawn_processors(checked, spawner, on_lost)
        config = prepared.config
        training = spawn_offline(prepared, spawner, on_lost, on_rescore, processors.watched)
        in_flight = InFlightRequests(config.sampler.chunk_tokens)  # none
        ranks = partial(rank_statuses, training.ranks, training.learner)
        roles = {**training.scalable, **processors.scalable}
        control = control_loop(config, spawner, roles, in_flight, training.rows, metrics, ranks)
        async with control.running():
            await _started(metrics.start_up.timing("learner", training.ranks.start()), processors.start())
            controller = await asyncio.to_thread(
                build_offline_controller, prepared, training, metrics, stop_request, audit
            )
            tune_gc()
            await controller.run()


async def _train_on_rollouts(
    cluster: _Cluster,
    checked: Prepared,
    metrics: Metrics,
    tracer: RunTracer,
    stop_request: StopRequest,
    audit: RunAudit,
) -> None:
    async with cluster.spawner() as spawner:
        on_lost = partial(metrics.count, CounterName.RESTARTS)
        on_rescore = partial(metrics.count, CounterName.REFERENCE_RETRIES)
        prepared, processors = spawn_processors(checked, spawner, on_lost)
        beside = processors.watched
        training = spawn_training(prepared, spawner, on_lost, on_rescore, tracer)
        inference = spawn_inference(prepared, spawner, on_lost)
        roles = {**scalable_roles(inference, training), **processors.scalable}
        in_flight, ranks = inference.in_flight_requests, partial(rank_statuses, training.ranks, training.learner)
        control = control_loop(prepared.config, spawner, roles, in_flight, training.replay, metrics, ranks)
        try:
            async with control.running():
                timing = metrics.start_up.timing
                await _started(
                    timing("learner", training.ranks.start()),
                    timing("engines", inference.rollouts.start()),
                    timing("scorers", inference.rewards.start()),
                    processors.start(),
                )
                controller = await asyncio.to_thread(
                    build_controller, prepared, inference, training, metrics, tracer, beside, stop_request, audit
                )
                tune_gc()
                await controller.run()
        finally:
            await training.replay.close()


async def _started(*roles: Coroutine[Any, Any, Any]) -> None:
    """Raises: PreflightError: the configuration does not fit the model."""
    try:
        await run_all(*roles)
    except ValueError as error:
        raise PreflightError(str(error)) from error


async def _evaluate(
    output: Path | None, prepared: Prepared, inference: Inference
) -> tuple[list[EvaluationResult], float]:
    """Returns the result of each suite, and the seconds that sampling and scoring took."""
    roles = (inference.rollouts, inference.rewards)
    responses = response_log(prepared, output)
    evaluator = await asyncio.to_thread(build_evaluator, prepared, *roles, lambda result: None, responses)
    started = time.perf_counter()
    return await evaluator.run(0), time.perf_counter() - started


async def _serving(cluster: _Cluster, work: Callable[[Prepared, Inference], Awaitable[T]]) -> T:
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


async def _until_signal(work: Coroutine[Any, Any, Any], is_handled: Callable[[], bool] = lambda: False) -> Any:
    """Runs `work`. SIGINT, SIGTERM and SIGHUP cancel it, unless `is_handled()` returns True: `work` ends then.
    Afterwards signals are ignored while summary and report are written.

    `ray job stop` sends SIGTERM, and SIGKILL 3 s later (RAY_JOB_STOP_WAIT_TIME_S).
    """
    task = asyncio.ensure_future(work)

    def stop(number: int) -> None:
        if number == signal.SIGHUP:  # a closing terminal sends it twice, through the kernel and through the shell
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        if not is_handled():
            task.cancel()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, *ending_signals())
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        ignore_signals()  # the loop's end would restore defaults, and a late signal cost summary and cluster


def _leave_behind(prepared: AnyPrepared, metrics: Metrics, status: Status, wall_s: float, error: str) -> Summary:
    """Writes summary and report after success or failure. An error here does not hide the error that ended the run."""
    config = prepared.config
    facts = RunFacts(
        seed=config.seed,
        sampler="none" if config.offline.is_on else config.sampler.kind,
        learner_backend=config.learner.backend,
        learner_ranks=config.resources.learner.num_workers,
        rollout_actors=0 if config.offline.is_on else config.resources.rollout.num_workers,
        train_prompts=len(prepared.splits[TRAIN].rows),
    )
    metrics.set_counts(CounterName.SKIPPED, count_by_reason(prepared.skipped))  # also what ended the run
    summary = summarize(metrics, facts, status=status, version=metrics.totals.version, wall_s=wall_s, error=error)
    with informing("the summary"):
        write_summary(prepared.folder / SUMMARY_FILE, summary)
        write_skipped(prepared.folder, prepared.skipped)
    with informing("the report"):
        write_report(prepared.folder)
    return summary


def _write_plan(path: Path, plan: PlacementPlan) -> None:
    rows = [
        {
            "role": worker.role,
            "index": worker.index,
            "cpus": worker.num_cpus,
            "gpus": worker.num_gpus,
            "node": worker.node_name,
            "node_id": worker.node_id,
            "cores": list(worker.cores),
        }
        for worker in plan.workers
    ]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
