"""Compares runs in one offline HTML file with curves, intervals and a table.

Runs that differ only in their seed form one line of the comparison. Its curves are means over the runs with one
standard deviation on each side; its table entries are means with a bootstrap interval over the runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import METRICS_FILE, RunFolder, read_run_folder
from mobula.cluster.metrics.report.samples import read_rows
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord, difference, strict
from mobula.cluster.metrics.step_records import distinct_identities as distinct
from mobula.cluster.metrics.summary import bootstrap_interval, mcnemar, paired_interval
from mobula.deploy.pages.report import Chart, Curve, Point, counted_in, render, unit_of, write_duration
from mobula.deploy.preflight.findings import refusing
from mobula.deploy.run.run_client import RUNS, named_folder

PAGE = "comparison.html"
MAX_LINES = 6  # colours of the style sheet
SEED = 0  # of the bootstrap over runs

_CURVES = (
    (MetricName.REWARD_MEAN, "Reward"),
    (MetricName.RESPONSE_LENGTH, "Response length"),
    (MetricName.ENTROPY, "Entropy"),
    (MetricName.KL, "KL to the reference"),
    (MetricName.CLIP_FRACTION, "Clipped tokens"),
    (MetricName.TOKENS_PER_S, "Throughput"),
)
_Values = Mapping[int, float]  # by step or version


@dataclass(frozen=True)
class ComparedRuns:
    label: str
    runs: Sequence[RunFolder]


@dataclass(frozen=True)
class Interval:
    """A mean over runs with its 95 % interval. For one run it is the run's own interval, or has the width 0."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (f" [{self.low:.3f}, {self.high:.3f}]" if self.low < self.high else "")


@dataclass(frozen=True)
class SuiteAccuracy:
    """Accuracy of one line on one suite: before RL, after it, mean and maximum over all later evaluations. `before` is
    None if the first evaluation of a run differs from this one, for example in its split."""

    label: str
    suite: str
    num_runs: int
    before: Interval | None
    after: Interval | None
    mean: Interval | None
    best: Interval | None
    values: Mapping[str, float]  # of the newest evaluation, means over runs
    counted: str  # prompts or responses behind each mean of the newest evaluations


def render_comparison(lines: Sequence[ComparedRuns], *, by_epoch: bool) -> str:
    """Renders the page as HTML. `by_epoch` draws over epochs of the training data instead of steps."""
    if not 1 <= len(lines) <= MAX_LINES:
        raise ValueError(f"{len(lines)} lines cannot be compared: give 1 to {MAX_LINES}, seeds of one setting as one")
    rows, charts = table(lines), _Charts(lines, by_epoch)
    return render(
        "comparison.html.j2",
        unit=_unit(lines),
        lines=lines,
        rows=rows,
        value_names=list(dict.fromkeys(name for row in rows for name in row.values)),
        courses=[_course(line) for line in lines],
        charts=[chart for chart in (*charts.accuracy(), *charts.curves()) if chart.has_values],
    )


def _unit(lines: Sequence[ComparedRuns]) -> str:
    return unit_of([run for line in lines for run in line.runs])


def table(lines: Sequence[ComparedRuns]) -> list[SuiteAccuracy]:
    """Returns one row per line and evaluated suite, sorted by suite."""
    evaluations = _Evaluations(lines)
    rows = [_row(line, suite, evaluations) for suite in evaluations.suites for line in lines]
    return [row for row in rows if row is not None]


class _Evaluations:
    """The evaluations of all runs by suite. A suite that was evaluated in several ways, in one run or in several, is
    several suites, whose names say what differs: their numbers are not comparable."""

    def __init__(self, lines: Sequence[ComparedRuns]) -> None:
        records = [record for line in lines for run in line.runs for of in _by_suite(run).values() for record in of]
        self.suites: dict[str, tuple[str, Mapping[str, Any]]] = {}  # name -> suite and identity
        for suite in dict.fromkeys(record.suite for record in records):
            identities = distinct(record for record in records if record.suite == suite)
            for n, identity in enumerate(identities):
                label = f"{suite} ({difference(identities[0], identity)})" if n else suite
                self.suites[label if label not in self.suites else f"{label} {n}"] = (suite, identity)

    def of(self, run: RunFolder, name: str) -> tuple[Sequence[EvaluationRecord], bool]:
        """Returns the records of a run by version, and whether they begin with the run's first evaluation."""
        suite, identity = self.suites[name]
        every = _by_suite(run).get(suite, ())
        records = [record for record in every if record.identity == identity]
        return records, records[:1] == list(every[:1])


def _by_suite(run: RunFolder) -> dict[str, Sequence[EvaluationRecord]]:
    return {suite: records for suite, records in {HELD_OUT: run.evaluations, **run.suites}.items() if records}


def _row(line: ComparedRuns, suite: str, evaluations: _Evaluations) -> SuiteAccuracy | None:
    found = [(records, is_first) for run in line.runs for records, is_first in [evaluations.of(run, suite)] if records]
    if not found:
        return None
    by_run = [records for records, _ in found]
    firsts = [records[0] for records, is_first in found if is_first]
    later = [rest for records, is_first in found if (rest := records[1:] if is_first else records)]
    newest = [records[-1] for records in by_run]
    names = dict.fromkeys(name for record in newest for name in record.values)
    return SuiteAccuracy(
        line.label,
        suite,
        len(by_run),
        _over_runs(firsts) if firsts else None,
        _over_runs([records[-1] for records in later]) if later else None,
        _interval([mean(record.accuracy for record in records) for records in later]) if later else None,
        _interval([max(record.accuracy for record in records) for records in later]) if later else None,
        {name: mean(record.values[name] for record in newest if name in record.values) for name in names},
        ", ".join(dict.fromkeys(record.counted for record in newest)),
    )


def _over_runs(records: Sequence[EvaluationRecord]) -> Interval:
    if len(records) == 1:
        return Interval(records[0].accuracy, records[0].low, records[0].high)
    return _interval([record.accuracy for record in records])


def _interval(values: Sequence[float]) -> Interval:
    return Interval(mean(values), *bootstrap_interval(values, SEED))


def _course(line: ComparedRuns) -> tuple[str, ...]:
    summaries = [run.summary for run in line.runs if run.summary is not None]
    rates = [s.samples_per_s for s in summaries if s.samples_per_s is not None]
    lengths = [s.response_length for s in summaries if s.response_length is not None]
    return (
        line.label,
        ", ".join(run.name for run in line.runs),
        ", ".join(sorted({f"{len(run.steps):,}" for run in line.runs})),
        write_duration(mean(s.wall_s for s in summaries)) if summaries else "–",
        f"{mean(rates):,.1f}" if rates else "–",
        f"{mean(lengths):,.1f}" if lengths else "–",
    )


@dataclass(frozen=True)
class _Charts:
    lines: Sequence[ComparedRuns]
    by_epoch: bool

    def accuracy(self) -> Iterator[Chart]:
        """Yields training accuracy (over epochs: cumulative within each), then each suite."""
        text = "All sampled responses" + (", cumulative within an epoch." if self.by_epoch else ".")
        yield self._chart("accuracy", "Training accuracy", text, self._training_accuracy, domain=(0.0, 1.0))
        evaluations = _Evaluations(self.lines)
        for suite in evaluations.suites:
            title, text = f"Accuracy on {suite.replace('_', ' ')}", "Each point is one weight version."
            values = partial(_suite_accuracy, evaluations, suite)
            yield self._chart(f"suite_{suite}", title, text, values, domain=(0.0, 1.0))

    def curves(self) -> Iterator[Chart]:
        for name, title in _CURVES:
            title, text, unit = (counted_in(_unit(self.lines), words) for words in (title, name.help, name.unit))
            yield self._chart(str(name), title, text, partial(_step_values, name), unit=unit)

    def _chart(
        self,
        key: str,
        title: str,
        text: str,
        values: Callable[[RunFolder], _Values],
        *,
        domain: tuple[float, float] | None = None,
        unit: str = "",
    ) -> Chart:
        axis = "epoch" if self.by_epoch else "step"
        series = [Curve(line.label, n, self._points(line, values)) for n, line in enumerate(self.lines, start=1)]
        return Chart(key, title, text, series, unit, domain=domain, axis=axis)

    def _points(self, line: ComparedRuns, values: Callable[[RunFolder], _Values]) -> list[Point]:
        """Returns the mean over the runs that have a value at a step, with one standard deviation on each side."""
        values_at: dict[float, list[float]] = {}
        for run in line.runs:
            length = _steps_per_epoch(run) if self.by_epoch else 1.0
            for step, value in values(run).items():
                if math.isfinite(value):
                    values_at.setdefault(step / length, []).append(value)
        return [Point(x, mean(at), mean(at) - pstdev(at), mean(at) + pstdev(at)) for x, at in sorted(values_at.items())]

    def _training_accuracy(self, run: RunFolder) -> _Values:
        if not self.by_epoch:
            return {record.step: record.accuracy for record in run.steps if record.accuracy is not None}
        steps = [record for record in run.steps if record.accuracy is not None]
        return dict(_cumulative(steps, _steps_per_epoch(run)))


def _step_values(name: MetricName, run: RunFolder) -> _Values:
    return {record.step: record.values[name] for record in run.steps if name in record.values}


def _suite_accuracy(evaluations: _Evaluations, suite: str, run: RunFolder) -> _Values:
    return {record.version: record.accuracy for record in evaluations.of(run, suite)[0]}


def _cumulative(steps: Sequence[StepRecord], steps_per_epoch: float) -> Iterator[tuple[int, float]]:
    """Yields (step, accuracy over all responses of its epoch so far)."""
    epoch, correct, num = -1, 0.0, 0.0
    for record in steps:
        if (now := int((record.step - 1) // steps_per_epoch)) != epoch:
            epoch, correct, num = now, 0.0, 0.0
        samples = record.values[MetricName.NUM_SAMPLES]
        correct, num = correct + samples * (record.accuracy or 0.0), num + samples
        yield record.step, correct / num


def _steps_per_epoch(run: RunFolder) -> float:
    if run.summary is None or run.summary.train_prompts is None or not run.config:
        raise ValueError(f"run {run.name} has no summary.json or no config.yaml: compare it over steps, not epochs")
    return run.summary.train_prompts / yaml.safe_load(run.config)["algorithm"]["prompts_per_step"]


def compare(
    arguments: Sequence[str], output: Path | None, json_output: Path | None, by_epoch: bool, console: Console
) -> None:
    """Writes the page, by default into the folder of the first run's folder, and prints its table. An argument is
    `[LABEL=]RUN[,RUN...]`: runs that differ in their seed."""
    lines = [_line(argument) for argument in arguments]
    with refusing():
        page = render_comparison(lines, by_epoch=by_epoch)
    if output is None:
        first = arguments[0].rpartition("=")[2].partition(",")[0]
        output = named_folder(first, METRICS_FILE).resolve().parent / PAGE
    write_atomically(output, page)
    rows = table(lines)
    if json_output is not None:
        text = json.dumps([strict(asdict(row)) for row in rows], indent=2, allow_nan=False)
        write_atomically(json_output, text + "\n")
    view = Table("suite", "setting", "runs", "before", "after", "mean", "best")
    for row in rows:
        cells = (row.before, row.after, row.mean, row.best)
        view.add_row(row.suite, row.label, str(row.num_runs), *("–" if cell is None else str(cell) for cell in cells))
    console.print(view)
    for paired in pairs(arguments):
        console.print(str(paired), soft_wrap=True)
    console.print(f"comparison: {output}", soft_wrap=True)


@dataclass(frozen=True)
class PairedRows:
    """The rows that two runs both answered in their newest evaluation: how many are better in the second, how many
    worse, and the mean difference with its 95 % interval."""

    suite: str
    first: str
    second: str
    num: int
    better: int
    worse: int
    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        p = mcnemar(self.better, self.worse)
        return (
            f"{self.suite}: {self.second} - {self.first} = {self.difference:+.3f} (95 % {self.low:+.3f} to "
            f"{self.high:+.3f}) on {self.num} common rows, better on {self.better}, worse on {self.worse}: p = {p:.2g} "
            "(exact McNemar test)"
        )


def pairs(arguments: Sequence[str]) -> Iterator[PairedRows]:
    """Pairs the first run with each other one by row, in each suite of both. Runs that wrote no rows are left out."""
    folders = [named_folder(name, METRICS_FILE) for each in arguments for name in each.rpartition("=")[2].split(",")]
    first = folders[0]
    for second in folders[1:]:
        for suite, records in _by_suite(read_run_folder(first)).items():
            if "control" in records[-1].identity:
                continue
            of_first, of_second = read_rows(first, suite), read_rows(second, suite)
            rows = [row for row in of_first if row in of_second]
            if rows:
                differences = [of_second[row] - of_first[row] for row in rows]
                yield PairedRows(
                    suite,
                    first.name,
                    second.name,
                    len(rows),
                    sum(each > 0 for each in differences),
                    sum(each < 0 for each in differences),
                    mean(differences),
                    *paired_interval(differences),
                )


def _line(argument: str) -> ComparedRuns:
    label, _, names = argument.rpartition("=")
    runs = [_run(name) for name in names.split(",") if name]
    if not runs:
        raise PreflightError(
            f"{argument!r} names no run: give [LABEL=]RUN[,RUN...], each a folder or a name below {RUNS}/"
        )
    return ComparedRuns(label or ", ".join(run.name for run in runs), runs)


def _run(name: str) -> RunFolder:
    folder = named_folder(name, METRICS_FILE)
    try:
        return read_run_folder(folder)
    except (ValueError, KeyError, OSError) as error:
        raise PreflightError(f"run {folder} cannot be read: {error}") from error
