"""Builds the tracer of a run from its configuration."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mobula.cluster.errors import PreflightError
from mobula.cluster.tracing.chrome import ChromeTraceSink
from mobula.cluster.tracing.spans import RunTracer, SpanSink
from mobula.configs.schema import TracingConfig

FOLDER = "traces"  # of the run folder
SPANS_FILE = "spans.jsonl"


def build_tracer(config: TracingConfig, run: str, folder: Path) -> RunTracer:
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
    return RunTracer(sinks)


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
    except ModuleNotFoundError:  # the parent package is missing
        return False
