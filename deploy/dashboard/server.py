"""The page of `mobula dashboard`: served on the loopback address, without anything from another machine."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from cluster.errors import PreflightError
from cluster.metrics.report.page import STYLE, environment
from deploy.dashboard.prometheus import EVERY_RUN, Prometheus, PrometheusError, TimeRange
from deploy.grafana.panels import DASHBOARDS, Panel

LOOPBACK = "127.0.0.1"
ASSETS = Path(__file__).parent
MAX_MINUTES = 7 * 24 * 60
NUM_POINTS = 240  # of a line; Prometheus is asked for no more
MIN_STEP_S = 5.0  # what gauges are set again in
POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"


def make_app(prometheus: Prometheus, now: Callable[[], float] = time.time) -> FastAPI:
    """The page, its two files, and the data of its panels. Only the queries of the dashboards are passed on.

    Requests that name another host are refused: a page of another site could else read the data through a name of its
    own that resolves to this machine.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"])
    page = environment(ASSETS).get_template("dashboard.html.j2").render(dashboards=DASHBOARDS, source=prometheus.url)
    files = {
        "dashboard.css": ("text/css", STYLE.read_text("utf-8") + (ASSETS / "dashboard.css").read_text("utf-8")),
        "dashboard.js": ("text/javascript", (ASSETS / "dashboard.js").read_text("utf-8")),
    }

    @app.get("/")
    def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    @app.get("/files/{name}")
    def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"there is no file {name}")
        kind, content = files[name]
        return Response(content, media_type=kind)

    @app.get("/runs")
    async def runs() -> list[str]:
        return await prometheus.runs()

    @app.get("/panels/{name}")
    async def panels(name: str, run: str = EVERY_RUN, minutes: int = 60) -> dict[str, Any]:
        if name not in DASHBOARDS:
            raise HTTPException(404, f"there is no dashboard {name}: it is one of {', '.join(DASHBOARDS)}")
        if not 1 <= minutes <= MAX_MINUTES:
            raise HTTPException(422, f"minutes={minutes} is not between 1 and {MAX_MINUTES}")
        stretch = _stretch(now(), minutes)
        shown = await asyncio.gather(*(_as_json(panel, prometheus, run, stretch) for panel in DASHBOARDS[name]))
        return {"start": stretch.start, "end": stretch.end, "step_s": stretch.step_s, "panels": shown}

    @app.exception_handler(PrometheusError)
    async def unanswered(request: Request, error: PrometheusError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=502)

    return app


def serve(prometheus_url: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve the page until SIGTERM or SIGINT; `announce` receives its URL. `port` 0 takes a free one.

    Raises:
        PreflightError: no Prometheus answers there, or the port is taken.
    """
    runs = asyncio.run(_runs_of(prometheus_url))
    with closing(_listen(port)) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(Prometheus(prometheus_url)), log_level="warning"))
        for number in (signal.SIGTERM, signal.SIGINT):  # the server raises what stopped it again once it is done
            signal.signal(number, lambda *_: None)
        known = ", ".join(runs) if runs else "none yet: a run is shown once Prometheus has scraped it"
        announce(f"http://{LOOPBACK}:{listener.getsockname()[1]} (runs: {known})")
        server.run(sockets=[listener])


async def _runs_of(url: str) -> list[str]:
    prometheus = Prometheus(url)
    try:
        return await prometheus.runs()
    except PrometheusError as error:
        raise PreflightError(
            f"{error}: start a Prometheus that scrapes Ray's metrics and give --prometheus URL; a run is also shown by "
            "`mobula top`, and its finished steps by `mobula report`, without one"
        ) from error
    finally:
        await prometheus.close()


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise PreflightError(f"--port {port} is not free ({error.strerror}): give another one, or 0") from error


def _stretch(end: float, minutes: int) -> TimeRange:
    """The last `minutes`, on a grid that a later look shares."""
    step_s = max(MIN_STEP_S, float(round(60 * minutes / NUM_POINTS)))
    last = step_s * (end // step_s)
    return TimeRange(last - 60 * minutes, last, step_s)


async def _as_json(panel: Panel, prometheus: Prometheus, run: str, stretch: TimeRange) -> dict[str, Any]:
    lines = await prometheus.lines(panel, run, stretch)
    return {
        "title": panel.title,
        "unit": panel.unit,
        "lines": [{"label": line.label, "points": line.points} for line in lines],
    }
