"""Progress of a run on the console, with the estimated end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord

_logger = logging.getLogger(__name__)
NUM_MEASURED = 3  # steps; the first fills caches and is left out of the mean


class EstimateSink:
    """Logs once, after the third step of this start. The run ends at step `num_steps`."""

    name = "estimate"

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._seconds: list[float] = []

    def emit(self, record: StepRecord) -> None:
        if len(self._seconds) == NUM_MEASURED:
            return
        self._seconds.append(record.seconds["total"])
        num_left = self._num_steps - record.step
        if len(self._seconds) == NUM_MEASURED and num_left > 0:
            step_s = sum(self._seconds[1:]) / (NUM_MEASURED - 1)
            _logger.info("a step takes %.1f s: about %s left for %d steps", step_s, _about(step_s * num_left), num_left)

    def emit_evaluation(self, record: EvaluationRecord) -> None: ...

    def close(self) -> None: ...


def _about(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class ConsoleSink:
    """A progress bar on a terminal; elsewhere one log line at most every `interval_s` seconds, and one at the end.

    The run starts at `version` and ends at `num_steps`. The time left is estimated from the steps so far, without the
    start-up (engines, warm start).
    """

    name = "console"

    def __init__(
        self, console: Console, clock: Callable[[], float], *, num_steps: int, version: int, interval_s: float
    ) -> None:
        self._clock = clock
        self._num_steps = num_steps
        self._interval_s = interval_s
        self._measure = "accuracy"  # what the newest evaluation calls it
        self._num_done = 0
        self._steps_s = 0.0  # seconds of all steps so far
        self._last_line_s = -math.inf
        self._progress = _bar(console) if console.is_terminal else None
        if self._progress is not None:
            self._task = self._progress.add_task("", total=num_steps, completed=version, numbers="waiting for rollouts")
            self._progress.start()

    def emit(self, record: StepRecord) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, numbers=_numbers(record, self._measure))
            return
        self._num_done += 1
        self._steps_s += record.seconds["total"]
        now = self._clock()
        if now - self._last_line_s >= self._interval_s or record.step >= self._num_steps:
            self._last_line_s = now
            left_s = round(self._steps_s / self._num_done * (self._num_steps - record.step))
            hours, minutes, seconds = left_s // 3600, left_s // 60 % 60, left_s % 60
            left = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
            _logger.info("step %d/%d  %s  %s left", record.step, self._num_steps, _numbers(record, self._measure), left)

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        interval = f"95 % {record.low:.3f} to {record.high:.3f}, {record.counted}"
        suite = "held-out" if record.suite == HELD_OUT else record.suite
        self._measure = record.measure
        text = f"{suite} {record.measure} at version {record.version}: {record.accuracy:.3f} ({interval})"
        if self._progress is not None:
            self._progress.console.print(text, highlight=False)
        else:
            _logger.info(text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
    )


def _numbers(record: StepRecord, measure: str) -> str:
    values = record.values
    trained = _means(values, {"reward": MetricName.REWARD_MEAN, measure: MetricName.ACCURACY})
    sampled = _means(values, {"reward": MetricName.SAMPLED_REWARD_MEAN, measure: MetricName.SAMPLED_ACCURACY})
    # Filters choose groups by their rewards: the means of trained groups are not those of the policy.
    every = (
        f"(all {values[MetricName.NUM_SAMPLED_GROUPS]:.0f} groups: {sampled})  " if sampled not in ("", trained) else ""
    )
    return f"{trained}  {every}{values[MetricName.TOKENS_PER_S]:,.0f} tokens/s"


def _means(values: Mapping[str, float], names: Mapping[str, MetricName]) -> str:
    return "  ".join(f"{label} {values[name]:.3f}" for label, name in names.items() if name in values)
