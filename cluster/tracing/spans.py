"""RunTracer: measures spans of prompts and steps and passes them to sinks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

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


class SpanSink(Protocol):
    """A destination of spans. A sink that raises is dropped and the run continues."""

    name: str

    def record(self, span: Span) -> None:
        """Called at the end of a stage or phase."""
        ...

    def finish(self, whole: Span) -> None:
        """Called at the end of a trace; `whole` covers all of its spans."""
        ...

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
        """Ends the trace and its open spans."""
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


UNTRACED = RunTracer()
"""A tracer without sinks."""
