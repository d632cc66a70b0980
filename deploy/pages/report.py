"""Writes report.html and the tables of a run."""

from __future__ import annotations

import base64
import csv
import io
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import REPORT_FILE, RunFolder, read_run_folder
from mobula.cluster.metrics.report.samples import ReportSample, Sheet, Video, read_sheets, read_videos
from mobula.cluster.metrics.step_records import HELD_OUT, BeforeAfter, EvaluationRecord, StepRecord
from mobula.cluster.metrics.summary import Summary
from mobula.cluster.workers.faults import Fault
from mobula.deploy.pages.charts import (
    accuracy_chart,
    curves,
    guard_charts,
    phase_colours,
    phase_label,
    phases_chart,
    unit_of,
)
from mobula.deploy.pages.page import render, write_bytes, write_duration, write_number

STEPS_FILE, EVALUATIONS_FILE = "metrics.csv", "eval_metrics.csv"
Cell = float | int | str


def write_tables(folder: Path, run: RunFolder) -> None:
    """Writes both files, with a column for each number of any row; missing numbers are empty."""
    suites = {HELD_OUT: run.evaluations, **run.suites}
    write_atomically(folder / STEPS_FILE, table([_step(record) for record in run.steps]))
    rows = [_evaluation(record) for records in suites.values() for record in records]
    write_atomically(folder / EVALUATIONS_FILE, table(rows))


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _step(record: StepRecord) -> dict[str, Cell]:
    seconds = {f"{name}_s": value for name, value in record.seconds.items()}
    rewards = {f"r_{name}": value for name, value in record.components.items()}
    return {"step": record.step, **record.values, **rewards, **seconds}


def _evaluation(record: EvaluationRecord) -> dict[str, Cell]:
    own: dict[str, Cell] = {"suite": record.suite, "version": record.version, "accuracy": record.accuracy}
    num: dict[str, Cell] = {"num": record.num, "num_unscored": record.num_unscored}
    identity = {f"evaluation_{name}": value for name, value in record.identity.items()}
    return {**own, "low": record.low, "high": record.high, **num, **record.values, **identity}


_MAX_SKIPPED_ROWS = 200
_MAX_FAULT_ROWS = 200  # the newest ones
_UNFINISHED = "unfinished"  # no summary
_STATUS_TEXTS = {"killed": "the driver was killed"}  # others are shown as they are


Fact = tuple[str, str, str]  # label, value and help of a number of the headline


def write_report(run_folder: Path, summary: Summary | None = None) -> Path:
    """Writes `report.html` and CSV files from the files of a run folder; `summary` replaces that of the folder."""
    run = read_run_folder(run_folder)
    run = run if summary is None else replace(run, summary=summary)
    text = render_report(run, read_sheets(run_folder), read_videos(run_folder))
    write_tables(run_folder, run)
    path = run_folder / REPORT_FILE
    write_atomically(path, text.encode("utf-8", errors="replace").decode("utf-8"))
    return path


def render_report(
    run: RunFolder, sheets: Sequence[Sheet] = (), videos: Sequence[tuple[int, Sequence[Video]]] = ()
) -> str:
    """Renders the report as HTML. All data is escaped; only our own script may run, allowed by its hash."""
    status, unit = run.summary.status if run.summary else _UNFINISHED, unit_of([run])
    pair = BeforeAfter.of(run.evaluations)
    return render(
        "report.html.j2",
        run=run,
        summary=run.summary,
        status=status,
        status_text=_STATUS_TEXTS.get(status, status),
        sheets=[(suite, list(of_suite)) for suite, of_suite in groupby(sheets, key=lambda sheet: sheet.suite)],
        videos=videos,
        data_uri=_data_uri,
        before=pair.before,
        after=pair.after,
        not_compared=pair.reason,
        facts=_facts(run),
        accuracy=accuracy_chart(run.steps, run.evaluations),
        curves=[*guard_charts(run.steps, run.guard), *curves(run.steps, unit)],
        unit=unit,
        phases=phases_chart(run.steps),
        shares=_phase_shares(run),
        staleness=_staleness_rows(run),
        tallies=_tallies(run),
        faults=_fault_rows(run.faults)[-_MAX_FAULT_ROWS:],
        num_faults=len(run.faults),
        samples=sorted(run.samples.samples, key=_sample_order),
        images={key: _data_uri(png) for key, png in {**run.samples.thumbnails, **run.pictures}.items()},
        skipped_counts=sorted(Counter(row.reason for row in run.skipped).items()),
        skipped=run.skipped[:_MAX_SKIPPED_ROWS],
        num_skipped=len(run.skipped),
    )


def _facts(run: RunFolder) -> list[Fact]:
    """Returns the numbers of the headline; without a summary, the number of steps alone."""
    if run.summary is None:
        return [("steps", f"{len(run.steps):,}", "")]
    s, unit = run.summary, unit_of([run])
    wall_time_of = "at least: that of the finished steps" if s.status == "killed" else "start-up included"
    return [
        ("steps", f"{s.num_steps:,}", f"version {s.version}"),
        ("wall time", write_duration(s.wall_s), wall_time_of),
        ("samples/s", _optional(s.samples_per_s), "of the whole loop"),
        (f"{unit}s/s", _optional(s.tokens_per_s), "of the whole loop"),
        ("weight syncs", f"{s.weight_syncs:,}", "pushed to all engines"),
        ("restarts", f"{s.restarts:,}", "after failures"),
        ("mean log-prob gap", _optional(s.logprob_gap_mean), f"largest {_optional(s.logprob_gap_max)}"),
        ("seed", str(s.seed), ""),
        ("engines", f"{s.rollout_actors} × {s.sampler}", "rollout actors"),
        ("learner", f"{s.learner_ranks} × {s.learner_backend}", "ranks"),
        ("canary", _optional(s.canary_max), "largest gap after a push"),
        ("mean length", _optional(s.response_length), _lengths_not_trained(s.rejected_length, unit)),
        ("images stored", _size(s.media_bytes_unique), f"unshared {_size(s.media_bytes_referenced)}"),
        *_pushes(run),
        *_stage(run),
    ]


def _pushes(run: RunFolder) -> list[Fact]:
    sizes, shares = (
        [step.values[name] for step in run.steps if name in step.values]
        for name in (MetricName.PUSH_BYTES, MetricName.PUSH_CHANGED_SHARE)
    )
    if not sizes:
        return []
    changed = f"{100 * sum(shares) / len(shares):.2g} % of the weights changed" if shares else "to each engine"
    return [("size of a push", _size(round(sum(sizes) / len(sizes))), changed)]


def _stage(run: RunFolder) -> list[Fact]:
    values = run.steps[-1].values if run.steps else {}
    if MetricName.CURRICULUM_STAGE not in values:
        return []
    stage = int(values[MetricName.CURRICULUM_STAGE])
    opened = next(r.step for r in run.steps if r.values.get(MetricName.CURRICULUM_STAGE) == stage)
    return [("curriculum stage", str(stage), f"open since step {opened}")]


def _lengths_not_trained(lengths: Mapping[str, float], unit: str) -> str:
    """Rejected responses that are longer than trained ones show a bias towards short responses."""
    shown = ", ".join(f"{reason.replace('_', ' ')} {_optional(length)}" for reason, length in sorted(lengths.items()))
    return f"{unit}s; not trained: {shown}" if shown else f"{unit}s"


def _phase_shares(run: RunFolder) -> list[tuple[str, int, float, float]]:
    """Returns label, colour, seconds, and per cent of the wall time of each phase."""
    totals: Counter[str] = Counter()
    for record in run.steps:
        totals.update({name: s for name, s in record.phases.items() if math.isfinite(s)})
    whole = math.fsum(totals.values())
    if whole <= 0:
        return []
    return [
        (phase_label(name), colour, totals[name], 100 * totals[name] / whole)
        for name, colour in phase_colours(run.steps).items()
    ]


def _staleness_rows(run: RunFolder) -> list[tuple[int, int, float]]:
    """Returns (lag, tokens, per cent of all trained tokens)."""
    tokens: Counter[int] = Counter()
    for record in run.steps:
        tokens.update(record.staleness)
    whole = sum(tokens.values())
    return [(lag, n, 100 * n / whole) for lag, n in sorted(tokens.items()) if whole]


def _tallies(run: RunFolder) -> list[tuple[str, list[tuple[str, int]]]]:
    """Returns each counter that is not empty with its reasons, the largest first."""
    counters = run.steps[-1].counters if run.steps else {}
    return [
        (name.replace("_", " "), sorted(reasons.items(), key=lambda item: -item[1]))
        for name, reasons in counters.items()
        if any(reasons.values())
    ]


def _fault_rows(faults: Sequence[Fault]) -> list[tuple[str, ...]]:
    """Returns the cells of each row, by time; consecutive faults of one worker with the same cause are one row."""
    rows: list[tuple[str, ...]] = []
    for (worker, kind, cause), group in groupby(faults, key=lambda fault: (fault.worker, fault.kind, fault.cause)):
        equal = list(group)
        first, last = _local_time(equal[0].at_s), _local_time(equal[-1].at_s)
        when = first if first == last else f"{first} to {last}"
        rows.append((when, _steps(equal), _phases(equal), worker, f"{kind}: {cause}", str(len(equal))))
    return rows


def _steps(faults: Sequence[Fault]) -> str:
    steps = [fault.step for fault in faults if fault.step is not None]
    if not steps:
        return "–"
    return f"{steps[0]}" if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"


def _phases(faults: Sequence[Fault]) -> str:
    return ", ".join(dict.fromkeys(phase_label(fault.phase) for fault in faults if fault.phase)) or "–"


def _local_time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _sample_order(sample: ReportSample) -> tuple[bool, int, int]:
    """Sort key: late before early, best before worst before random, newest first."""
    return (sample.period == "early", ("best", "worst", "random").index(sample.kind), -sample.step)


def _data_uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _optional(value: float | None) -> str:
    return "–" if value is None else write_number(value)


def _size(value: int | None) -> str:
    return "–" if value is None else write_bytes(value)
