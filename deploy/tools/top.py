"""`mobula top`: a running run as a table that stays up to date, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from mobula.cluster.errors import PreflightError, RunOverError
from mobula.cluster.workers.status import RunStatus
from mobula.deploy.run.run_client import RunAddress, statuses
from mobula.deploy.tools.status_view import as_table


def show_top(run: RunAddress, console: Console, *, interval_s: float, timeout_s: float) -> str:
    """Show the run until it is over or the user interrupts; returns why it ended.

    Raises:
        PreflightError: the console is no terminal.
    """
    if not console.is_terminal:
        raise PreflightError("mobula top needs a terminal: `mobula status` prints the same once, or with --json")
    return follow(statuses(run, timeout_s), console, interval_s=interval_s, sleep=time.sleep, now=time.time)


def follow(
    statuses: Iterator[RunStatus],
    console: Console,
    *,
    interval_s: float,
    sleep: Callable[[float], None],
    now: Callable[[], float],
) -> str:
    """Redraws the table with each status."""
    with Live(console=console, auto_refresh=False, transient=False) as live:
        try:
            for status in statuses:
                live.update(as_table(status, now()), refresh=True)
                sleep(interval_s)
        except RunOverError as error:
            return str(error)
        except KeyboardInterrupt:
            return "the run goes on"
    return "the run is over"
