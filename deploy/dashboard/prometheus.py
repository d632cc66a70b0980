"""Queries to a Prometheus server: the names of runs, and the lines of a panel over a range of time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from cluster.errors import PreflightError
from cluster.proxies import proxy_of
from deploy.grafana.panels import RUNS, Panel, Query

EVERY_RUN = ""
TIMEOUT_S = 20.0
_FIELD = re.compile(r"\{\{(\w+)\}\}")


class PrometheusError(RuntimeError):
    """Prometheus does not answer, or refuses a query."""


@dataclass(frozen=True)
class TimeRange:
    """A stretch of time to look at, in seconds since the epoch, and the distance of its points."""

    start: float
    end: float
    step_s: float


@dataclass(frozen=True)
class PanelSeries:
    """One series of a panel: (seconds since the epoch, value) in order."""

    label: str
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """The HTTP interface of one server.

    Example:
        found = await Prometheus("http://127.0.0.1:9090").lines(panel, "digits", TimeRange(start, end, 15))
    """

    def __init__(self, url: str) -> None:
        """Raises:
        PreflightError: the URL is none, or holds credentials.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PreflightError(f"--prometheus {url} is no address: give one such as http://127.0.0.1:9090")
        if parts.username or parts.password:
            raise PreflightError(
                f"--prometheus names {parts.hostname} with a user or password, which process lists show: "
                "use a proxy that adds them"
            )
        self.url = url.rstrip("/")
        proxy = proxy_of(httpx.URL(self.url))
        self._client = httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, trust_env=False, proxy=proxy[1] if proxy else None
        )

    async def runs(self) -> list[str]:
        """Names of the runs of which it has a series."""
        return sorted(await self._get("/api/v1/label/run/values", {"match[]": "ray_mobula_up"}))

    async def lines(self, panel: Panel, run: str, stretch: TimeRange) -> list[PanelSeries]:
        """The lines of all queries of a panel, for one run or for `EVERY_RUN`."""
        found: list[PanelSeries] = []
        for query in panel.queries:
            found += await self._lines_of(query, run, stretch)
        return found

    async def close(self) -> None:
        await self._client.aclose()

    async def _lines_of(self, query: Query, run: str, stretch: TimeRange) -> list[PanelSeries]:
        answer = await self._get(
            "/api/v1/query_range",
            {
                "query": of_run(query.expression, run),
                "start": f"{stretch.start:.3f}",
                "end": f"{stretch.end:.3f}",
                "step": f"{stretch.step_s:g}",
            },
        )
        lines = [
            PanelSeries(legend(query.legend, series["metric"]), _points(series["values"]))
            for series in answer["result"]
        ]
        return [line for line in lines if line.points]

    async def _get(self, path: str, params: Mapping[str, str]) -> Any:
        try:
            reply = await self._client.get(path, params=dict(params))
        except httpx.HTTPError as error:
            raise PrometheusError(f"{self.url} does not answer ({type(error).__name__}: {error})") from error
        try:
            body = reply.json()
            if body["status"] == "success":
                return body["data"]
            raise PrometheusError(f"{self.url} refuses {path}: {body['error']}")
        except (ValueError, KeyError, TypeError) as error:
            raise PrometheusError(f"{self.url}{path} is no Prometheus: HTTP {reply.status_code}") from error


def of_run(expression: str, run: str) -> str:
    """A query of the dashboards for one run, or for every run."""
    quoted = run.replace("\\", "\\\\").replace('"', '\\"')
    return expression.replace(RUNS, 'run=~".+"' if run == EVERY_RUN else f'run="{quoted}"')


def legend(template: str, labels: Mapping[str, str]) -> str:
    """A Grafana legend with its labels filled in; one that a series does not have reads as nothing."""
    return _FIELD.sub(lambda found: labels.get(found[1], ""), template).strip()


def _points(values: list[list[Any]]) -> tuple[tuple[float, float], ...]:
    """Numbers alone: Prometheus writes NaN and infinities as texts."""
    numbers = [(float(time), float(text)) for time, text in values]
    return tuple((time, value) for time, value in numbers if math.isfinite(value))
