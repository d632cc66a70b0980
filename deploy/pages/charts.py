"""Charts of a report as SVG, and the units of their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.guard_events import GuardEvent
from mobula.cluster.metrics.report.run_folder import RunFolder
from mobula.cluster.metrics.step_records import EvaluationRecord, StepRecord, difference, distinct_identities
from mobula.configs.schema.rollout import SamplerKind
from mobula.deploy.pages.page import write_number

TOKEN = "token"
DENOISING_STEP = "denoising step"
STALENESS = (MetricName.STALENESS, MetricName.STALENESS_MAX)  # mean and largest
LOGPROB_GAP = (MetricName.LOGPROB_GAP_MEAN, MetricName.LOGPROB_GAP_MAX)


def unit_of(runs: Sequence[RunFolder]) -> str:
    """Returns the unit of runs, in the singular; it depends on the sampler."""
    samplers = {run.summary.sampler for run in runs if run.summary is not None}
    return DENOISING_STEP if samplers == {SamplerKind.FLOW.value} else TOKEN


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

_OTHER_COLOUR = 6


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
    return Chart("accuracy", "Accuracy", text, series, domain=(0.0, 1.0))


def curves(steps: Sequence[StepRecord], unit: str = TOKEN) -> list[Chart]:
    """Returns the other charts in reading order, without empty charts. `unit` is the unit of response lengths."""
    charts = [
        _reward(steps),
        _preference(steps),
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


def phases_chart(steps: Sequence[StepRecord]) -> Chart:
    series = [curve(phase_label(name), colour, values) for name, colour, values in _phase_seconds(steps)]
    text = "Wall time of each step, split by what it was spent on. Steps that take far longer than most are cut off."
    return Chart("seconds", "Seconds per phase", text, series, "s", is_stacked=True)


def phase_label(name: str) -> str:
    """Returns the label of a phase; an unknown phase keeps its name."""
    return _PHASE_LABELS.get(name, name)


def phase_colours(steps: Sequence[StepRecord]) -> dict[str, int]:
    """Returns the colour of each phase in the order of the loop; `other` is last and grey."""
    names = dict.fromkeys(name for record in steps for name in record.phases if name != "other")
    return {name: 1 + i % 5 for i, name in enumerate(names)} | {"other": _OTHER_COLOUR}


def _phase_seconds(steps: Sequence[StepRecord]) -> list[tuple[str, int, list[tuple[int, float]]]]:
    """Returns per phase the colour and (step, seconds); 0 s for a step without the phase."""
    return [
        (name, colour, [(r.step, r.phases[name] if name in r.phases else 0.0) for r in steps])
        for name, colour in phase_colours(steps).items()
    ]


def _reward(steps: Sequence[StepRecord]) -> Chart:
    series = []
    names = list(dict.fromkeys(name for record in steps for name in record.components))
    if len(names) > 1:
        for i, name in enumerate(names[:4]):
            values = [(r.step, r.components[name]) for r in steps if name in r.components]
            series.append(curve(name, 2 + i, values))
    series.append(curve("reward", 1, _values(steps, MetricName.REWARD_MEAN)))
    return Chart("reward", "Reward", MetricName.REWARD_MEAN.help, series)


def _turns(steps: Sequence[StepRecord]) -> Chart:
    names = {f"turn {n}": f"turn_reward_{n}" for n in range(1, 6)}
    series = [
        curve(label, n, [(r.step, r.values[name]) for r in steps if name in r.values])
        for n, (label, name) in enumerate(names.items(), start=1)
    ]
    text = "Mean of what the environment paid for a turn; 0 for episodes that ended before it."
    return Chart("turns", "Reward of turns", text, series)


def _preference(steps: Sequence[StepRecord]) -> Chart:
    names = {"chosen": MetricName.CHOSEN_REWARD, "rejected": MetricName.REJECTED_REWARD, "margin": MetricName.MARGIN}
    series = [curve(label, n, _values(steps, name)) for n, (label, name) in enumerate(names.items(), start=1)]
    return Chart("preference", "Chosen and rejected answers", MetricName.MARGIN.help, series)


def _single(steps: Sequence[StepRecord], name: MetricName, title: str, colour: int) -> Chart:
    return Chart(name, title, name.help, [curve(title.lower(), colour, _values(steps, name))], name.unit)


def _pair(
    steps: Sequence[StepRecord], key: str, title: str, unit: str, names: Sequence[MetricName], is_log: bool = False
) -> Chart:
    """Returns the chart of a mean and the largest value; `names` are those of both."""
    mean, largest = names
    series = [curve("largest", 2, _values(steps, largest), keeps_peaks=True), curve("mean", 1, _values(steps, mean))]
    return Chart(key, title, mean.help + (" (logarithmic axis)" if is_log else ""), series, unit, is_log=is_log)


def _values(steps: Sequence[StepRecord], name: MetricName) -> list[tuple[int, float]]:
    return [(record.step, record.values[name]) for record in steps if name in record.values]
