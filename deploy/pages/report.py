"""Pages of a run: formats of numbers, charts as SVG, report.html and its tables."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.guard_events import GuardEvent
from mobula.cluster.metrics.report.run_folder import REPORT_FILE, RunFolder, read_run_folder
from mobula.cluster.metrics.report.samples import (
    HeldOutAnswer,
    ReportSample,
    Sheet,
    Video,
    read_answers,
    read_sheets,
    read_videos,
)
from mobula.cluster.metrics.step_records import (
    HELD_OUT,
    BeforeAfter,
    EvaluationRecord,
    StepRecord,
    difference,
    distinct_identities,
)
from mobula.cluster.metrics.summary import Summary
from mobula.cluster.workers.faults import Fault
from mobula.configs.schema.rollout import SamplerKind


def answers(references: Sequence[str]) -> list[str]:
    """The references without a boxed copy of the first."""
    return [text for text in references if text and text != f"\\boxed{{{references[0]}}}"]


def write_number(value: float) -> str:
    """Formats a number with about three significant digits: 0.0312, 1.25, 12.5, 1,250, 3.1e-7."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e7:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if size >= 100:
        return f"{value:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".")


def write_bytes(value: float) -> str:
    """Formats a size in binary units: 3.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{write_number(value)} {unit}"
        value /= 1024
    return f"{write_number(value)} TiB"


def write_duration(seconds: float) -> str:
    """Formats a duration: 4.2 s, 3 min 05 s, 2 h 10 min."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{write_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


ASSETS = Path(__file__).parent
STYLE = ASSETS / "report.css"


def environment(folder: Path) -> Environment:
    """Returns the template environment of `folder`; an undefined name in a template is an error."""
    templates = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(number=write_number, duration=write_duration, bytes=write_bytes, answers=answers)
    return templates


def render(template: str, **values: Any) -> str:
    """Renders a template of this folder with style and script. The browser may run no other script."""
    style, script = (
        "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)
        for names in (("uplot.min.css", "report.css"), ("uplot.min.js", "report.js"))
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template_values = {"style": Markup(style), "script": Markup(script), "script_hash": f"sha256-{digest}"}
    return environment(ASSETS).get_template(template).render(**values, **template_values)


TOKEN = "token"
DENOISING_STEP = "denoising step"
STALENESS = (MetricName.STALENESS, MetricName.STALENESS_MAX)  # mean and largest
LOGPROB_GAP = (MetricName.LOGPROB_GAP_MEAN, MetricName.LOGPROB_GAP_MAX)


def unit_of(runs: Sequence[RunFolder]) -> str:
    """Returns the unit of runs, in the singular; it depends on the sampler."""
    samplers = {run.summary.sampler for run in runs if run.summary is not None}
    steps = {SamplerKind.FLOW.value, SamplerKind.IMAGE_PATCHES.value}
    return DENOISING_STEP if samplers and samplers <= steps else TOKEN


def counted_in(unit: str, text: str) -> str:
    return text.replace(TOKEN, unit)


MAX_POINTS = 500  # of one drawn curve


@dataclass(frozen=True)
class Point:
    """One value at a step with a range (an interval, or the extremes of thinned steps)."""

    step: float
    value: float
    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        return abs(self.value) < 1e300  # False for NaN; larger values overflow the scale


@dataclass(frozen=True)
class Curve:
    """One named curve. `colour` is the index of a colour in the style sheet; `keeps_peaks` thins by maximum."""

    label: str
    colour: int
    points: Sequence[Point]
    keeps_peaks: bool = False

    @property
    def has_values(self) -> bool:
        return any(point.is_finite for point in self.points)


@dataclass(frozen=True)
class Chart:
    """One chart. Stacked curves have equal steps; the first curve is the lowest."""

    key: str
    title: str
    help: str
    series: Sequence[Curve]
    unit: str = ""
    is_log: bool = False
    is_stacked: bool = False
    domain: tuple[float, float] | None = None  # of the values, unless some lie outside
    axis: str = "step"  # unit of the horizontal axis: whole steps, or epochs
    marks: Sequence[tuple[float, str]] = ()  # (step, label) of vertical lines

    @property
    def has_values(self) -> bool:
        return any(curve.has_values for curve in self.series)

    @property
    def data(self) -> dict[str, Any]:
        """Returns the input of `drawChart` in report.js. Values that cannot be drawn are null, which leaves a gap."""
        curves = [_curve_data(curve, self.is_log) for curve in self.series if curve.has_values]
        shown = {"axis": self.axis, "unit": self.unit, "domain": self.domain, "marks": list(self.marks)}
        return {**shown, "isLog": self.is_log, "isStacked": self.is_stacked, "curves": curves}

    @property
    def label(self) -> str:
        """Description of the chart for screen readers."""
        parts = []
        for curve in self.series:
            finite = [point for point in curve.points if point.is_finite]
            if finite:
                first, last = (
                    f"{write_number(point.value)} at {self.axis} {write_number(point.step)}"
                    for point in (finite[0], finite[-1])
                )
                parts.append(f"{curve.label} from {first} to {last}")
        parts += [f"{label} at {self.axis} {write_number(step)}" for step, label in self.marks]
        return f"{self.title}: {'; '.join(parts)}"


def curve(label: str, colour: int, values: Sequence[tuple[int, float]], *, keeps_peaks: bool = False) -> Curve:
    return Curve(label, colour, [Point(step, v, v, v) for step, v in values], keeps_peaks)


def thin(points: Sequence[Point], keeps_peaks: bool) -> list[Point]:
    """Returns at most MAX_POINTS points: neighbours are merged to mean or maximum, with the extremes as range."""
    if len(points) <= MAX_POINTS:
        return list(points)
    bounds = [round(i * len(points) / MAX_POINTS) for i in range(MAX_POINTS + 1)]
    return [_merge(points[a:b], keeps_peaks) for a, b in pairwise(bounds)]


def _merge(points: Sequence[Point], keeps_peaks: bool) -> Point:
    finite = [p for p in points if p.is_finite]
    step = (points[0].step + points[-1].step) / 2
    if not finite:
        return Point(step, math.nan, math.nan, math.nan)
    values = [p.value for p in finite]
    value = max(values) if keeps_peaks else math.fsum(values) / len(values)
    return Point(step, value, min(p.low for p in finite), max(p.high for p in finite))


def _curve_data(curve: Curve, is_log: bool) -> dict[str, Any]:
    points = thin(curve.points, curve.keeps_peaks)
    steps, values, lows, highs = (
        [_number(getattr(point, name), is_log and name != "step") for point in points]
        for name in ("step", "value", "low", "high")
    )
    data = {"label": curve.label, "colour": curve.colour, "steps": steps, "values": values}
    return {**data, "low": lows, "high": highs} if lows != highs else data


def _number(value: float, is_log: bool) -> float | None:
    """Rounds to six significant digits; returns None if the axis cannot show the value."""
    is_drawable = abs(value) < 1e300 and (value > 0 or not is_log)
    return float(f"{value:.6g}") if is_drawable else None


_PHASE_LABELS = {
    "wait_for_rollouts": "waiting for rollouts",
    "reference": "reference",
    "update": "update",
    "weight_sync": "weight sync",
    "other": "everything else",
}

_COLOURS, _OTHER_COLOUR = (1, 2, 3, 4, 5, 7, 8, 9), 6  # of phases


def accuracy_chart(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Chart:
    """Returns the chart of training accuracy and of held-out accuracy with 95 % intervals."""
    text = "Trained: sampled responses that were trained on. Held out: held-out prompts with 95 % intervals."
    series = [curve("trained", 1, _values(steps, MetricName.ACCURACY))]
    if any(record.accuracy != record.values.get(MetricName.ACCURACY) for record in steps):
        text += " Sampled: all sampled responses, with groups that were not trained."
        series.append(curve("sampled", 3, _values(steps, MetricName.SAMPLED_ACCURACY)))
    for n, identity in enumerate(identities := distinct_identities(evaluations)):
        label = "held out" + (f" ({difference(identities[0], identity)})" if n else "")
        points = [Point(e.version, e.accuracy, e.low, e.high) for e in evaluations if e.identity == identity]
        series.append(Curve(label, (2, 4, 5)[n % 3], points))
    measure = evaluations[-1].measure if evaluations else "accuracy"
    is_share = all(0 <= point.value <= 1 for line in series for point in line.points)
    return Chart("accuracy", measure.capitalize(), text, series, domain=(0.0, 1.0) if is_share else None)


def curves(steps: Sequence[StepRecord], unit: str = TOKEN) -> list[Chart]:
    """Returns the other charts in reading order, without empty charts. `unit` is the unit of response lengths."""
    rewards = {"chosen": MetricName.CHOSEN_REWARD, "rejected": MetricName.REJECTED_REWARD, "margin": MetricName.MARGIN}
    series = [curve(label, n, _values(steps, name)) for n, (label, name) in enumerate(rewards.items(), start=1)]
    charts = [
        _reward(steps),
        Chart("preference", "Chosen and rejected answers", MetricName.MARGIN.help, series),
        _turns(steps),
        _single(steps, MetricName.LOSS, "Loss", 5),
        _single(steps, MetricName.KL, "KL to the reference", 4),
        _single(steps, MetricName.ENTROPY, "Entropy", 3),
        _single(steps, MetricName.RESPONSE_LENGTH, "Response length", 1),
        _pair(steps, "staleness", "Staleness", "version lag", STALENESS),
        _pair(steps, "logprob_gap", "Log-prob gap", "nat", LOGPROB_GAP, is_log=True),
        _single(steps, MetricName.TOKENS_PER_S, "Throughput", 3),
        _single(steps, MetricName.GRAD_NORM, "Gradient norm", 5),
        _single(steps, MetricName.CLIP_FRACTION, "Clipped tokens", 2),
        _single(steps, MetricName.VALUE_LOSS, "Value loss", 5),
        _single(steps, MetricName.EXPLAINED_VARIANCE, "Explained variance", 4),
    ]
    return [_counted_in(unit, chart) for chart in charts if chart.has_values]


def _counted_in(unit: str, chart: Chart) -> Chart:
    title, text, of = (counted_in(unit, words) for words in (chart.title, chart.help, chart.unit))
    series = [replace(line, label=counted_in(unit, line.label)) for line in chart.series]
    return replace(chart, title=title, help=text, unit=of, series=series)


def guard_charts(steps: Sequence[StepRecord], events: Sequence[GuardEvent]) -> list[Chart]:
    """Returns the trained reward and the judge with the actions of the guard; none without a judge and an action."""
    series = [
        Curve(label, colour, [_with_error(record, name) for record in steps if name in record.values])
        for label, colour, name in (
            ("trained reward", 1, MetricName.GUARD_REWARD),
            ("judge (not trained)", 3, MetricName.GUARD_JUDGE),
        )
    ]
    if not any(line.has_values for line in series):
        series = [curve("trained reward", 1, _values(steps, MetricName.REWARD_MEAN))]
        if not events:
            return []
    marks = [(float(event.version), f"{event.action} ({event.sign})") for event in events]
    done = [f"Step {event.version}, {event.action}: {event.text}." for event in events]
    text = "Group means with one standard error; a dashed line is an action of the guard."
    return [Chart("guard", "Reward and judge", " ".join([text, *done]), series, marks=marks)]


def _with_error(record: StepRecord, name: MetricName) -> Point:
    value, error = record.values[name], record.values[f"{name}_se"]
    return Point(record.step, value, value - error, value + error)


def phase_label(name: str) -> str:
    return _PHASE_LABELS.get(name, name)


def phase_colours(steps: Sequence[StepRecord]) -> dict[str, int]:
    """Returns the colour of each phase in the order of the loop; `other` is last and grey."""
    names = dict.fromkeys(name for record in steps for name in record.phases if name != "other")
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)} | {"other": _OTHER_COLOUR}


def _reward(steps: Sequence[StepRecord]) -> Chart:
    names = list(dict.fromkeys(name for record in steps for name in record.components))
    series = []
    for i, name in enumerate(names[:4] if len(names) > 1 else ()):
        series.append(curve(name, 2 + i, [(r.step, r.components[name]) for r in steps if name in r.components]))
    series.append(curve("reward", 1, _values(steps, MetricName.REWARD_MEAN)))
    return Chart("reward", "Reward", MetricName.REWARD_MEAN.help, series)


def _turns(steps: Sequence[StepRecord]) -> Chart:
    series = [curve(f"turn {n}", n, _values(steps, f"turn_reward_{n}")) for n in range(1, 6)]
    text = "Mean of what the environment paid for a turn; 0 for episodes that ended before it."
    return Chart("turns", "Reward of turns", text, series)


def _single(steps: Sequence[StepRecord], name: MetricName, title: str, colour: int) -> Chart:
    return Chart(name, title, name.help, [curve(title.lower(), colour, _values(steps, name))], name.unit)


def _pair(
    steps: Sequence[StepRecord], key: str, title: str, unit: str, names: Sequence[MetricName], is_log: bool = False
) -> Chart:
    mean, largest = names
    series = [curve("largest", 2, _values(steps, largest), keeps_peaks=True), curve("mean", 1, _values(steps, mean))]
    return Chart(key, title, mean.help + (" (logarithmic axis)" if is_log else ""), series, unit, is_log=is_log)


def _values(steps: Sequence[StepRecord], name: str) -> list[tuple[int, float]]:
    return [(record.step, record.values[name]) for record in steps if name in record.values]


STEPS_FILE, EVALUATIONS_FILE = "metrics.csv", "eval_metrics.csv"
Cell = float | int | str


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def step_cells(record: StepRecord) -> dict[str, Cell]:
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
    text = report_page(run_folder, run)
    # Tables have a column for each number of any row; missing numbers are empty.
    suites = {HELD_OUT: run.evaluations, **run.suites}
    write_atomically(run_folder / STEPS_FILE, table([step_cells(record) for record in run.steps]))
    rows = [_evaluation(record) for records in suites.values() for record in records]
    write_atomically(run_folder / EVALUATIONS_FILE, table(rows))
    path = run_folder / REPORT_FILE
    write_atomically(path, text.encode("utf-8", errors="replace").decode("utf-8"))
    return path


def report_page(run_folder: Path, run: RunFolder | None = None) -> str:
    """Returns the report of a run folder as HTML; `run` is its content, if it was read before."""
    media = read_sheets(run_folder), read_videos(run_folder)
    return render_report(run or read_run_folder(run_folder), *media, read_answers(run_folder))


def render_report(
    run: RunFolder,
    sheets: Sequence[Sheet] = (),
    videos: Sequence[tuple[int, Sequence[Video]]] = (),
    held_out: Sequence[tuple[HeldOutAnswer, HeldOutAnswer]] = (),
) -> str:
    """Renders the report as HTML. All data is escaped; only our own script may run, allowed by its hash."""
    status, unit = run.summary.status if run.summary else _UNFINISHED, unit_of([run])
    pair = BeforeAfter.of(run.evaluations)
    phases = [
        curve(phase_label(name), colour, [(r.step, r.phases[name] if name in r.phases else 0.0) for r in run.steps])
        for name, colour in phase_colours(run.steps).items()
    ]
    text = "Wall time of each step, split by phase. Steps that take far longer than most are cut off."
    tokens: Counter[int] = Counter()
    for record in run.steps:
        tokens.update(record.staleness)
    whole = sum(tokens.values())
    return render(
        "report.html.j2",
        run=run,
        summary=run.summary,
        status=status,
        status_text=_STATUS_TEXTS.get(status, status),
        sheets=[(suite, list(of_suite)) for suite, of_suite in groupby(sheets, key=lambda sheet: sheet.suite)],
        videos=videos,
        held_out=held_out,
        data_uri=_data_uri,
        before=pair.before,
        after=pair.after,
        not_compared=pair.reason,
        controls=sorted(run.evaluations[-1].controls if run.evaluations else (), key=lambda each: each.gain),
        facts=_facts(run),
        accuracy=accuracy_chart(run.steps, run.evaluations),
        curves=[*guard_charts(run.steps, run.guard), *curves(run.steps, unit)],
        unit=unit,
        phases=Chart("seconds", "Seconds per phase", text, phases, "s", is_stacked=True),
        shares=_phase_shares(run),
        staleness=[(lag, n, 100 * n / whole) for lag, n in sorted(tokens.items()) if whole],
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


def _tallies(run: RunFolder) -> list[tuple[str, str, list[tuple[str, int]]]]:
    """Returns (name, help, reasons) of each counter that is not empty; the largest reasons come first."""
    counters, helps = run.steps[-1].counters if run.steps else {}, {name.value: name.help for name in CounterName}
    return [
        (name.replace("_", " "), helps.get(name, ""), sorted(reasons.items(), key=lambda item: -item[1]))
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
