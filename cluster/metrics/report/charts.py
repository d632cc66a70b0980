"""Charts of a page: curves over steps, thinned, as JSON for `report.js`, which draws them with uPlot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mobula.cluster.metrics.report.written_numbers import write_number

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
    """Builds a curve from plain (step, value) pairs."""
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
