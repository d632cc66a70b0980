"""The report of an offline scoring as one HTML page that opens without a network and runs no script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mobula.cluster.metrics.report.page import STYLE, environment
from mobula.cluster.metrics.report.written_numbers import write_number

_ASSETS = Path(__file__).parent
TOTAL = "total"
_ROOM = 0.12  # of a bin, on both sides of its bars
_MAX_ISSUE_IDS = 60


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, in units of a bin and of the tallest bar."""

    x: float
    width: float
    height: float
    colour: int
    label: str


@dataclass(frozen=True)
class HistogramPair:
    """One component's scores (or the totals) under two schemes, side by side."""

    title: str
    num_bins: int
    bars: Sequence[Bar]
    ticks: Sequence[tuple[float, str]]  # place in per cent, text
    tallest: str


def render_page(report: Mapping[str, Any]) -> str:
    """The page. Everything from the records is escaped: responses may be hostile."""
    templates = environment(_ASSETS)
    templates.filters.update(percent=lambda share: f"{100 * share:.1f} %", whole="{:,}".format)
    templates.tests["mapping_of_scores"] = lambda value: isinstance(value, Mapping)
    first, second = report["differences"]["between"]
    by_scheme = {report["semantics"]: report, **report["others"]}
    return templates.get_template("page.html.j2").render(
        report=report,
        name=Path(report["input"]["path"]).name,
        schemes=by_scheme,
        shown=[first, second],
        histograms=_histograms(by_scheme[first], by_scheme[second], (first, second)) if report["count"] else [],
        max_ids=_MAX_ISSUE_IDS,
        options=json.dumps(report["options"], indent=1),
        style=Markup(STYLE.read_text(encoding="utf-8") + (_ASSETS / "page.css").read_text(encoding="utf-8")),
    )


def _histograms(first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str]) -> list[HistogramPair]:
    """The totals, then each component; bars of the second scheme where it has the component."""
    ours, theirs = first["histograms"], second["histograms"]
    order = [TOTAL, *(name for name in ours if name != TOTAL)]
    return [_histogram(name, [ours[name], *([theirs[name]] if name in theirs else [])], names) for name in order]


def _histogram(title: str, series: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> HistogramPair:
    shares = [[count / max(1, sum(s["counts"])) for count in s["counts"]] for s in series]
    tallest = max(max(share) for share in shares) or 1.0
    num_bins, low, high = len(shares[0]), min(s["low"] for s in series), max(s["high"] for s in series)
    bars = [
        _bar(index, share / tallest, place, len(series), one, (low, high), f"{100 * share:.2f} % by {names[place]}")
        for place, (one, of_scheme) in enumerate(zip(series, shares, strict=True))
        for index, share in enumerate(of_scheme)
        if share
    ]
    ticks = [(25.0 * quarter, write_number(low + (high - low) * quarter / 4)) for quarter in range(5)]
    return HistogramPair(title, num_bins, bars, ticks, f"{100 * tallest:.0f} %")


def _bar(
    index: int, height: float, place: int, num: int, of: Mapping[str, Any], axis: tuple[float, float], text: str
) -> Bar:
    """A bin's bar on an axis that may reach further than the bins: the `place`-th of `num` side by side."""
    num_bins, low, high = len(of["counts"]), of["low"], of["high"]
    start, end = (low + (high - low) * i / num_bins for i in (index, index + 1))
    unit = num_bins / (axis[1] - axis[0])
    room = (end - start) * unit
    width = room * (1 - 2 * _ROOM) / num
    label = f"{write_number(start)} to {write_number(end)}: {text}"
    return Bar((start - axis[0]) * unit + room * _ROOM + place * width, width, height, 1 + place, label)
