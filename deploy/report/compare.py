"""`mobula compare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.report.run_folder import METRICS_FILE, RunFolder, read_run_folder
from mobula.cluster.metrics.step_records import strict
from mobula.deploy.pages.comparison import ComparedRuns, SuiteAccuracy, render_comparison, table
from mobula.deploy.preflight.findings import refusing
from mobula.deploy.run.run_client import RUNS, named_folder


def compare(arguments: Sequence[str], output: Path, json_output: Path | None, by_epoch: bool, console: Console) -> None:
    """Writes the page and prints its table. An argument is `[LABEL=]RUN[,RUN...]`: runs that differ in their seed."""
    lines = [_line(argument) for argument in arguments]
    with refusing():
        page = render_comparison(lines, by_epoch=by_epoch)
    write_atomically(output, page)
    rows = table(lines)
    if json_output is not None:
        text = json.dumps([strict(asdict(row)) for row in rows], indent=2, allow_nan=False)
        write_atomically(json_output, text + "\n")
    console.print(_view(rows))
    console.print(f"comparison: {output}", soft_wrap=True)


def _line(argument: str) -> ComparedRuns:
    label, _, names = argument.rpartition("=")
    runs = [_run(name) for name in names.split(",") if name]
    if not runs:
        raise PreflightError(
            f"{argument!r} names no run: give [LABEL=]RUN[,RUN...], each a folder or a name below {RUNS}/"
        )
    return ComparedRuns(label or ", ".join(run.name for run in runs), runs)


def _run(name: str) -> RunFolder:
    folder = named_folder(name, METRICS_FILE)
    try:
        return read_run_folder(folder)
    except (ValueError, KeyError, OSError) as error:
        raise PreflightError(f"run {folder} cannot be read: {error}") from error


def _view(rows: Sequence[SuiteAccuracy]) -> Table:
    view = Table("suite", "setting", "runs", "before", "after", "mean", "best")
    for row in rows:
        cells = (row.before, row.after, row.mean, row.best)
        view.add_row(row.suite, row.label, str(row.num_runs), *("–" if cell is None else str(cell) for cell in cells))
    return view
