"""Builds the observers of a run: audit, metrics sinks, and the samples for its report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from uuid import uuid4

from rich.console import Console

from mobula.cluster.audit.chain import SigningKey
from mobula.cluster.audit.observer import AuditSink, RunAudit
from mobula.cluster.audit.writer import ChainWriter
from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.artifacts import ArtifactWriter, refuse_without_encoder
from mobula.cluster.metrics.guard_events import SignalWatch
from mobula.cluster.metrics.hub import Metrics, StartUp
from mobula.cluster.metrics.report.run_folder import METRICS_FILE, SAMPLES_FILE
from mobula.cluster.metrics.report.samples import ARTIFACTS_FOLDER, SampleKeeper
from mobula.cluster.metrics.sinks.base import Sink
from mobula.cluster.metrics.sinks.console import ConsoleSink, EstimateSink
from mobula.cluster.metrics.sinks.jsonl import JsonlSink
from mobula.cluster.metrics.sinks.ray_gauges import RaySink
from mobula.cluster.metrics.sinks.tensorboard import TensorBoardSink
from mobula.cluster.metrics.sinks.trackers import TrackedRun, tracker
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER

CONSOLE_INTERVAL_S = 10.0
RUN_ID_FILE = "run_id"  # in the run folder: name and id of the run

_logger = logging.getLogger(__name__)


def build_audit(config: RunConfig, key: SigningKey | None = None) -> RunAudit:
    """Returns the audit of a run, which continues the chain of an earlier part. `key` signs its records."""
    folder = config.run_folder
    if not config.metrics.audit:
        return RunAudit()
    return RunAudit(ChainWriter(folder, close_s=config.timeouts.stop_s, key=key), folder, folder / CHECKPOINTS_FOLDER)


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
        [*([AuditSink(audit)] if audit else []), journal, EstimateSink(num_steps=config.num_steps), *optional, *sinks],
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
        start_up=start_up,
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
