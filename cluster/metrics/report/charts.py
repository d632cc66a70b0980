"""Charts as inline SVG: series of a run, thinned for drawing, turned into paths and hover read-outs.

The SVG is stretched to its box (`preserveAspectRatio="none"`, strokes do not scale); all text is HTML placed in
per cent, so that one drawing reads well at every width and needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from cluster.metrics.report.chart_scales import Scale, linear_scale, log_scale, step_scale, step_ticks, write_number

WIDTH, HEIGHT = 1000, 400  # of the SVG's own coordinates
MAX_POINTS = 250  # of one drawn series

Form = Literal["line", "dots", "area"]


@dataclass(frozen=True)
class Point:
    """One value at a step, with the range it stands for (an interval, or the extremes of thinned steps)."""

    step: float
    value: float
    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        return abs(self.value) < 1e300  # False for NaN; beyond it a scale would overflow


@dataclass(frozen=True)
class Curve:
    """One named curve. `colour` is the number of a colour of the style sheet; `keeps_peaks` thins by maximum."""

    label: str
    colour: int
    points: Sequence[Point]
    form: Form = "line"
    keeps_peaks: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart. Areas are stacked in their order."""

    key: str
    title: str
    help: str
    series: Sequence[Curve]
    unit: str = ""
    is_log: bool = False
    from_zero: bool = True
    domain: tuple[float, float] | None = None
    axis: str = "step"  # what is counted from left to right: whole steps, or epochs


@dataclass(frozen=True)
class Drawing:
    """A chart as the template needs it: places are per cent from the left or the top."""

    chart: Chart
    paths: Sequence[tuple[str, str]]  # (class, path data)
    y_ticks: Sequence[tuple[float, str]]
    x_ticks: Sequence[tuple[float, str]]
    legend: Sequence[tuple[int, str]]
    label: str
    note: str
    hover: dict[str, Any] = field(repr=False)


def curve(label: str, colour: int, values: Sequence[tuple[int, float]], **options: Any) -> Curve:
    """A series of plain (step, value) pairs."""
    return Curve(label, colour, [Point(step, v, v, v) for step, v in values], **options)


def draw(chart: Chart) -> Drawing | None:
    """The drawing of a chart; None where it has no finite value."""
    series = [replace(s, points=thin(s.points, s.keeps_peaks)) for s in chart.series]
    series = [s for s in series if any(p.is_finite for p in s.points)]
    if not series:
        return None
    steps = [p.step for s in chart.series for p in s.points]
    first, last = math.floor(min(steps)), math.ceil(max(steps))
    x, (y, note) = step_scale(first, last), _value_scale(chart, series)
    return Drawing(
        chart=chart,
        paths=_area_paths(series, x, y) if series[0].form == "area" else _line_paths(series, x, y),
        y_ticks=[(100 * (1 - y.place(t)), write_number(t)) for t in y.ticks()],
        x_ticks=[(100 * x.place(t), write_number(t)) for t in step_ticks(first, last)],
        legend=[(s.colour, s.label) for s in series],
        label=_describe(chart),
        note=note,
        hover={"axis": chart.axis, "rows": _hover_rows(series, x, chart)},
    )


def thin(points: Sequence[Point], keeps_peaks: bool) -> list[Point]:
    """At most MAX_POINTS points: neighbours become their mean (or maximum) with their extremes as range."""
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


def _value_scale(chart: Chart, series: Sequence[Curve]) -> tuple[Scale, str]:
    """The scale of values, and a note where it leaves something out."""
    if series[0].form == "area":
        return _stack_scale(series)
    finite = [p.value for s in series for p in s.points if p.is_finite]
    if chart.domain is not None and all(chart.domain[0] <= value <= chart.domain[1] for value in finite):
        return Scale(*chart.domain), ""
    return (log_scale(finite) if chart.is_log else linear_scale(finite, from_zero=chart.from_zero)), ""


def _stack_scale(series: Sequence[Curve]) -> tuple[Scale, str]:
    """One slow step (the first, as a rule) may not flatten all others: the axis ends above the usual ones."""
    heights = sorted(
        math.fsum(p.value for p in column if p.is_finite) for column in zip(*(s.points for s in series), strict=True)
    )
    usual = heights[int(0.9 * (len(heights) - 1))]
    if heights[-1] <= 3 * usual or usual <= 0:
        return linear_scale(heights, from_zero=True), ""
    scale = linear_scale([1.5 * usual], from_zero=True)
    return scale, f"Cut off: the slowest goes up to {write_number(heights[-1])} s."


def _line_paths(series: Sequence[Curve], x: Scale, y: Scale) -> list[tuple[str, str]]:
    paths: list[tuple[str, str]] = []
    for s in series:
        finite = [p for p in s.points if p.is_finite]
        if s.form == "dots":
            paths.append((f"whisker c{s.colour}", "".join(_whisker(p, x, y) for p in finite if p.low < p.high)))
            paths.append((f"dot c{s.colour}", "".join(f"{_move(p.step, p.value, x, y)}h0" for p in finite)))
            continue
        drawable = [p if p.is_finite and (p.value > 0 or not y.is_log) else None for p in s.points]
        runs = _runs(drawable)
        if any(p.low < p.high for p in finite):
            paths.append((f"band c{s.colour}", "".join(_band(run, x, y) for run in runs if len(run) > 1)))
        paths.append((f"line c{s.colour}", "".join(_polyline(run, x, y) for run in runs if len(run) > 1)))
        lone = [run[0] for run in runs if len(run) == 1]
        paths.append((f"dot c{s.colour}", "".join(f"{_move(p.step, p.value, x, y)}h0" for p in lone)))
    return [(name, data) for name, data in paths if data]


def _area_paths(series: Sequence[Curve], x: Scale, y: Scale) -> list[tuple[str, str]]:
    """Stacked bars without gaps: step s fills the axis from s - 1/2 to s + 1/2 (thinned: up to its neighbours)."""
    columns = list(zip(*(s.points for s in series), strict=True))
    steps = [column[0].step for column in columns]
    middles = [(a + b) / 2 for a, b in pairwise(steps)]
    edges = [x.low, *middles, x.high]
    floors = [0.0] * len(columns)
    paths = []
    for s in series:
        tops = [floor + (p.value if p.is_finite else 0.0) for floor, p in zip(floors, s.points, strict=True)]
        boxes = zip(pairwise(edges), floors, tops, strict=True)
        bars = [_bar(a, b, low, top, x, y) for (a, b), low, top in boxes if top > low]
        paths.append((f"area c{s.colour}", "".join(bars)))
        floors = tops
    return paths


def _hover_rows(series: Sequence[Curve], x: Scale, chart: Chart) -> list[dict[str, Any]]:
    """Rows of the hover read-out: the position of each step in per cent, and one line for each series with a value
    there."""
    lines: dict[float, list[list[Any]]] = {}
    for s in series:
        for p in s.points:
            text = f"{write_number(p.value)} {chart.unit}".strip()
            if s.form == "dots" and p.low < p.high:
                text += f" ({write_number(p.low)} to {write_number(p.high)})"
            lines.setdefault(p.step, []).append([s.colour, s.label, text])
    return [
        {
            "at": round(100 * x.place(step), 2),
            "step": write_number(round(step)) if chart.axis == "step" else f"{step:.2f}",
            "lines": lines[step],
        }
        for step in sorted(lines)
    ]


def _describe(chart: Chart) -> str:
    """The chart in words, for those who do not see it."""
    parts = []
    for s in chart.series:
        finite = [p for p in s.points if p.is_finite]
        if finite:
            first, last = finite[0], finite[-1]
            parts.append(
                f"{s.label} from {write_number(first.value)} at {chart.axis} {write_number(first.step)} "
                f"to {write_number(last.value)} at {chart.axis} {write_number(last.step)}"
            )
    return f"{chart.title}: {'; '.join(parts)}"


def _runs(points: Sequence[Point | None]) -> list[list[Point]]:
    """Stretches without a gap."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def _at(step: float, value: float, x: Scale, y: Scale) -> str:
    return f"{WIDTH * x.place(step):.1f} {HEIGHT * (1 - y.place(value)):.1f}"


def _move(step: float, value: float, x: Scale, y: Scale) -> str:
    return f"M{_at(step, value, x, y)}"


def _polyline(points: Sequence[Point], x: Scale, y: Scale) -> str:
    return "M" + "L".join(_at(p.step, p.value, x, y) for p in points)


def _band(points: Sequence[Point], x: Scale, y: Scale) -> str:
    upper = [_at(p.step, p.high, x, y) for p in points]
    lower = [_at(p.step, p.low, x, y) for p in reversed(points)]
    return "M" + "L".join([*upper, *lower]) + "Z"


def _whisker(p: Point, x: Scale, y: Scale) -> str:
    return f"{_move(p.step, p.low, x, y)}L{_at(p.step, p.high, x, y)}"


def _bar(a: float, b: float, low: float, high: float, x: Scale, y: Scale) -> str:
    corners = (_at(a, low, x, y), _at(a, high, x, y), _at(b, high, x, y), _at(b, low, x, y))
    return "M" + "L".join(corners) + "Z"
