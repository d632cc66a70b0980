"""The command `mobula lmms-eval` and its table."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.table import Table

from mobula.deploy.checks.lmms_eval import LmmsEval, evaluate
from mobula.deploy.cli.errors import explained
from mobula.deploy.cli.options import takes
from mobula.deploy.host.terminal import terminal


@takes(LmmsEval)
def lmms_eval(options: LmmsEval) -> None:
    """Evaluate a model with the public harness lmms-eval, in its own environment (`make harness`)."""
    console = terminal(soft_wrap=True)
    with explained("what was scored until now is in the run's log alone; run it again"):
        with _stopped_by_sigterm():
            path, artifact = evaluate(options, lambda line: console.print(line, markup=False, highlight=False))
    terminal().print(_table(artifact))
    console.print(
        f"mean score {_figure(artifact['mean_primary_score'], 4)}, {artifact['num_samples']} samples in "
        f"{artifact['seconds']:.1f} s",
        markup=False,
        highlight=False,
    )
    console.print(f"written: {path}", markup=False, highlight=False)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an interrupt, so that the harness ends with this process."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _table(artifact: Mapping[str, Any]) -> Table:
    table = Table(title=f"lmms-eval {artifact['versions']['lmms-eval']}: {artifact['model']}")
    for name in ("task", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("score", "stderr", "samples", "empty", "tokens"):  # answers without a character; tokens an answer
        table.add_column(name, justify="right")
    for task in artifact["tasks"]:
        metric = task["primary_metric"]
        table.add_row(
            task["task"],
            metric or "-",
            _figure(task["primary_score"], 4),
            _figure(task["stderr"].get(_stderr_name(metric or "")), 4),
            str(task["num_samples"]),
            str(task["num_empty_answers"]),
            _figure(task["mean_output_tokens"], 1),
        )
    return table


def _stderr_name(metric: str) -> str:
    """Returns the harness's name for the standard error of `NAME` or `NAME,FILTER`."""
    name, comma, filtered = metric.partition(",")
    return f"{name}_stderr{comma}{filtered}"


def _figure(value: float | None, num_digits: int) -> str:
    return "-" if value is None else f"{value:.{num_digits}f}"
