"""ChromeTraceSink: writes single steps as JSON for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mobula.cluster.tracing.spans import Span

LOOP, PROMPTS = 1, 2  # process ids in the trace


class ChromeTraceSink:
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

    def finish(self, whole: Span) -> None:
        """Does nothing: the stages are already recorded."""

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
    """Yields complete events and the names of the rows; times count from the start of the step."""
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
    yield from _names(whole, rows)


def _names(whole: Span, rows: Mapping[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    for process, name in ((LOOP, whole.trace), (PROMPTS, "prompts")):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for (process, trace), row in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": trace or "loop"}}
