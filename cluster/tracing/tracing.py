"""Tracing of a run as its configuration asks for it: the collaborators as they are, or wrapped."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from mobula.cluster.controller import RunMetrics
from mobula.cluster.errors import PreflightError
from mobula.cluster.roles import Learner, Replay, Rewards, Rollouts
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.tracing.chrome import ChromeTraceSink
from mobula.cluster.tracing.spans import RunTracer, SpanSink
from mobula.cluster.tracing.traced_roles import (
    TracedLearner,
    TracedMetrics,
    TracedReplay,
    TracedRewards,
    TracedRollouts,
    on_attempt,
)
from mobula.configs.schema import TracingConfig

FOLDER = "traces"  # of the run folder
SPANS_FILE = "spans.jsonl"


class Tracing(Protocol):
    """Each method returns what the run is to use in the place of its argument."""

    def rollouts(self, rollouts: Rollouts, in_flight: InFlightRequests) -> Rollouts: ...

    def rewards(self, rewards: Rewards) -> Rewards: ...

    def replay(self, replay: Replay) -> Replay: ...

    def learner(self, learner: Learner) -> Learner: ...

    def metrics(self, metrics: RunMetrics) -> RunMetrics: ...

    def close(self) -> None: ...


class NoTracing:
    """Everything as it is."""

    def rollouts(self, rollouts: Rollouts, in_flight: InFlightRequests) -> Rollouts:
        return rollouts

    def rewards(self, rewards: Rewards) -> Rewards:
        return rewards

    def replay(self, replay: Replay) -> Replay:
        return replay

    def learner(self, learner: Learner) -> Learner:
        return learner

    def metrics(self, metrics: RunMetrics) -> RunMetrics:
        return metrics

    def close(self) -> None: ...


class WrappedRun:
    """Everything wrapped, with one tracer."""

    def __init__(self, tracer: RunTracer) -> None:
        self._tracer = tracer

    def rollouts(self, rollouts: Rollouts, in_flight: InFlightRequests) -> Rollouts:
        in_flight.on_attempt = partial(on_attempt, self._tracer)
        return TracedRollouts(rollouts, self._tracer)

    def rewards(self, rewards: Rewards) -> Rewards:
        return TracedRewards(rewards, self._tracer)

    def replay(self, replay: Replay) -> Replay:
        return TracedReplay(replay, self._tracer)

    def learner(self, learner: Learner) -> Learner:
        return TracedLearner(learner, self._tracer)

    def metrics(self, metrics: RunMetrics) -> RunMetrics:
        return TracedMetrics(metrics, self._tracer)

    def close(self) -> None:
        self._tracer.close()


def build_tracing(config: TracingConfig, run: str, folder: Path) -> Tracing:
    """Raises:
    PreflightError: the library of the exporter is not installed.
    """
    refuse_missing_exporter(config)
    sinks: list[SpanSink] = []
    if config.chrome_steps:
        sinks.append(ChromeTraceSink(folder / FOLDER, config.chrome_steps))
    if config.exporter != "none":
        from mobula.cluster.tracing.telemetry import TelemetrySink, file_exporter, otlp_exporter

        is_file = config.exporter == "file"
        exporter = file_exporter(folder / FOLDER / SPANS_FILE) if is_file else otlp_exporter(config.address)
        sinks.append(TelemetrySink(exporter, run))
    return WrappedRun(RunTracer(sinks)) if sinks else NoTracing()


def refuse_missing_exporter(config: TracingConfig) -> None:
    """Raises:
    PreflightError: the library of the exporter is not installed.
    """
    needed = {
        "none": (),
        "file": ("opentelemetry.sdk",),
        "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    }[config.exporter]
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        raise PreflightError(
            f"tracing.exporter={config.exporter} needs {', '.join(missing)}, which is not installed: "
            "`pip install 'mobula[tracing]'` on the machine of the driver, or set tracing.exporter=none"
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
