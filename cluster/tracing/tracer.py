"""Spans of a run, and traces for Chrome."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mobula.cluster.errors import PreflightError
from mobula.configs.schema import TracingConfig

_logger = logging.getLogger(__name__)
Value = str | int | float


class Stage(StrEnum):
    """Stages of a prompt, in order. Reference log-probs are computed between `BUFFERED` and `TRAINED`."""

    QUEUED = "queued"  # has a slot and waits for a rollout actor
    GENERATED = "generated"  # from the first attempt on an actor until all siblings are complete
    SCORED = "scored"
    BUFFERED = "buffered"  # waits for its step, and for space in the buffer
    TRAINED = "trained"  # the update of its step


@dataclass(frozen=True)
class Span:
    """One stage of a prompt, or one phase of a step. Times are nanoseconds since the epoch."""

    trace: str  # the prompt's id, or `step N`
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


class SpanSink:
    """A destination of spans. A sink that raises is dropped and the run continues."""

    name: str

    def record(self, span: Span) -> None:
        """Called at the end of a stage or phase."""

    def finish(self, whole: Span) -> None:
        """Called at the end of a trace; `whole` covers all of its spans."""

    def begin_step(self, step: int) -> None: ...

    def end_step(self, step: int, whole: Span) -> None: ...

    def close(self) -> None: ...


class RunTracer:
    """Measures spans by trace and name, and passes them to its sinks. Without sinks it measures nothing.

    Finished traces are not kept. `clock` returns nanoseconds.

    Example:
        with tracer.span([group_id], Stage.SCORED) as attributes:
            rewards = await pool.score(group, group_id)
            attributes["unscored"] = rewards.count(None)
    """

    def __init__(self, sinks: Sequence[SpanSink] = (), clock: Callable[[], int] = time.time_ns) -> None:
        self._sinks = list(sinks)
        self._clock = clock
        self._first: dict[str, int] = {}  # trace -> start
        self._open: dict[tuple[str, str], int] = {}

    @contextmanager
    def span(self, traces: Collection[str], name: str) -> Iterator[dict[str, Value]]:
        """Measures the body as span `name` of each of `traces`. Yields the attributes of the spans, to be filled in."""
        attributes: dict[str, Value] = {}
        for trace in traces:
            self.begin(trace, name)
        try:
            yield attributes
        finally:
            for trace in traces:
                self.end(trace, name, **attributes)

    @contextmanager
    def sampling(self, prompt_id: str) -> Iterator[dict[str, Value]]:
        """Measures sampling of a prompt: `queued` until the first attempt, then `generated`. Errors end the trace."""
        attributes: dict[str, Value] = {}
        self.begin(prompt_id, Stage.QUEUED)
        try:
            yield attributes
        except BaseException as error:
            self.finish(prompt_id, outcome=type(error).__name__)
            raise
        self.end(prompt_id, Stage.GENERATED, **attributes)

    def attempt(self, prompt_id: str) -> None:
        """Called when a rollout actor gets a prompt. Prompts of an evaluation have no trace."""
        if (prompt_id, Stage.QUEUED) in self._open:
            self.end(prompt_id, Stage.QUEUED)
            self.begin(prompt_id, Stage.GENERATED)

    def begin(self, trace: str, name: str) -> None:
        if not self._sinks:
            return
        now = self._clock()
        self._first.setdefault(trace, now)
        self._open[trace, name] = now

    def end(self, trace: str, name: str, **attributes: Value) -> None:
        """Ends an open span. Spans begun before a resume are ignored."""
        if (trace, name) in self._open:
            span = Span(trace, name, self._open.pop((trace, name)), self._clock(), attributes)
            self._each(lambda sink: sink.record(span))

    def finish(self, trace: str, **attributes: Value) -> None:
        if trace not in self._first:
            return
        for name in [name for known, name in self._open if known == trace]:
            self.end(trace, name)
        whole = Span(trace, "prompt", self._first.pop(trace), self._clock(), attributes)
        self._each(lambda sink: sink.finish(whole))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measures the body as a step; its phases are spans of the trace `step N`."""
        trace, start = f"step {step}", self._clock()
        self._each(lambda sink: sink.begin_step(step))
        try:
            yield
        finally:
            whole = Span(trace, "step", start, self._clock(), {"step": step})
            self._first.pop(trace, None)
            self._each(lambda sink: sink.end_step(step, whole))

    def close(self) -> None:
        """Closes the sinks. Stages in progress are not recorded."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, call: Callable[[SpanSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception:  # a full disk or a lost collector must not end the run
                _logger.exception("trace sink %s failed and is dropped; the run goes on without it", sink.name)
                self._sinks.remove(sink)


UNTRACED = RunTracer()  # A tracer without sinks


LOOP, PROMPTS = 1, 2  # process ids in the trace


class ChromeTraceSink(SpanSink):
    """Writes `step-000003.json` for each of `steps`: the phases of the loop, and a row per overlapping prompt.

    A stage of a prompt is recorded when it ends, which may be after the step. So a step is written after the end of the
    next step, or at the end of the run. Spans of other steps are not kept.
    """

    name = "chrome"

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        self._folder = folder
        self._steps = frozenset(steps)
        self._spans: list[Span] = []
        self._step = 0  # current
        self._waiting: dict[int, Span] = {}  # ended steps that are not written yet

    def record(self, span: Span) -> None:
        if self._step in self._steps or self._waiting:
            self._spans.append(span)

    def begin_step(self, step: int) -> None:
        self._step = step

    def end_step(self, step: int, whole: Span) -> None:
        self._write()
        self._step = 0
        if step in self._steps:
            self._waiting[step] = whole
        else:
            self._spans.clear()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        for step, whole in self._waiting.items():
            path = self._folder / f"step-{step:06d}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            overlapping = [s for s in self._spans if s.start_ns < whole.end_ns and s.end_ns > whole.start_ns]
            path.write_text(json.dumps({"traceEvents": list(_events(whole, overlapping))}) + "\n", encoding="utf-8")
        self._waiting.clear()


def _events(whole: Span, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    rows: dict[tuple[int, str], int] = {}
    for span in [whole, *sorted(spans, key=lambda span: span.start_ns)]:
        process = LOOP if span.trace.startswith("step ") else PROMPTS
        row = rows.setdefault((process, "" if process == LOOP else span.trace), len(rows))
        yield {
            "ph": "X",
            "name": span.name,
            "cat": "loop" if process == LOOP else "prompt",
            "ts": (span.start_ns - whole.start_ns) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "pid": process,
            "tid": row,
            "args": {"trace": span.trace, **span.attributes},
        }
    for process, name in ((LOOP, whole.trace), (PROMPTS, "prompts")):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for (process, trace), row in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": trace or "loop"}}


FOLDER = "traces"  # of the run folder
SPANS_FILE = "spans.jsonl"


def build_tracer(config: TracingConfig, run: str, folder: Path) -> RunTracer:
    """Raises: PreflightError: the library of the exporter is not installed."""
    refuse_missing_exporter(config)
    sinks: list[SpanSink] = []
    if config.chrome_steps:
        sinks.append(ChromeTraceSink(folder / FOLDER, config.chrome_steps))
    if config.exporter != "none":
        from mobula.cluster.tracing.telemetry import FileExporter, TelemetrySink, otlp_exporter

        is_file = config.exporter == "file"
        exporter = FileExporter(folder / FOLDER / SPANS_FILE) if is_file else otlp_exporter(config.address)
        sinks.append(TelemetrySink(exporter, run))
    return RunTracer(sinks)


def refuse_missing_exporter(config: TracingConfig) -> None:
    """Raises: PreflightError: the library of the exporter is not installed."""
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
