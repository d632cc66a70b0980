"""A server that speaks Prometheus's HTTP interface: it answers every query with a series for each of its runs."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse


class FakePrometheus:
    """`app` is an ASGI application; `error` is what it answers in place of data, if it is set."""

    def __init__(self, runs: list[str]) -> None:
        self.queries: list[str] = []
        self.error = ""
        self.app = FastAPI()

        @self.app.get("/api/v1/label/run/values")
        def names() -> Any:
            return {"status": "success", "data": runs}

        @self.app.get("/api/v1/query_range")
        def query_range(query: str, start: float, end: float, step: float) -> Any:
            self.queries.append(query)
            if self.error:
                return JSONResponse({"status": "error", "error": self.error}, status_code=400)
            times = [start + step * i for i in range(int((end - start) / step) + 1)]
            series = [
                {
                    "metric": {"run": run, "role": "rollout", "index": str(n), "phase": "update"},
                    "values": [[time, "NaN" if i == 3 else str(n + i % 7)] for i, time in enumerate(times)],
                }
                for n, run in enumerate(runs)
            ]
            return {"status": "success", "data": {"resultType": "matrix", "result": series}}
