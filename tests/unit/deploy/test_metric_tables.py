"""The tables of metrics in docs/monitoring.md are those of the definitions."""

from __future__ import annotations

import pytest

from mobula.cluster.metrics.definitions import (
    COUNTERS,
    LIVE,
    METRICS,
    SPLIT,
    CounterName,
    LiveName,
    MetricName,
    SplitName,
)
from mobula.deploy.grafana import metric_tables


def test_the_page_has_the_tables_of_today() -> None:
    page = metric_tables.TARGET.read_text(encoding="utf-8")
    assert metric_tables.rewritten(page) == page, "run `python -m mobula.deploy.grafana.metric_tables`"
    with pytest.raises(ValueError, match="needs one line"):
        metric_tables.rewritten("")


def test_every_name_is_defined_and_no_gauge_has_two_meanings() -> None:
    for names, metrics in ((MetricName, METRICS), (CounterName, COUNTERS), (LiveName, LIVE), (SplitName, SPLIT)):
        assert set(metrics) == set(names)
    series = [*METRICS, *LIVE, *SPLIT, *(f"{name}_total" for name in COUNTERS)]
    assert len(series) == len(set(series))
