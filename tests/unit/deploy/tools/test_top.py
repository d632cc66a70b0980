"""`mobula top` draws each status, ends with the run, and refuses what is no terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from mobula.cluster.errors import PreflightError, RunOverError
from mobula.cluster.roles import ReplayStats
from mobula.cluster.workers.status import InFlightSummary, Progress, RunStatus, WorkerState, WorkerStatus
from mobula.deploy.run.run_client import RunAddress
from mobula.deploy.tools.status_view import duration, follow, show_top

REPLAY = ReplayStats(num_ready=3, num_taken=2, num_bytes=4096, oldest_age_s=0.5, oldest_id="0/1/s1")
RUN = RunAddress("digits", "127.0.0.1:1", "digits")


def status(step: int, phase: str) -> RunStatus:
    workers = (WorkerStatus("rollout/0", WorkerState.SERVING, step - 1, 2, 0),)
    progress = Progress(step, phase, 1.5, step_s=30.0, tokens_per_s=1234.0)
    return RunStatus("digits", progress, 30, InFlightSummary(0, None, 0.0), REPLAY, workers, 0, 1, 1000.0)


def run_of(*found: RunStatus) -> Iterator[RunStatus]:
    yield from found
    raise RunOverError("run digits is over")


def test_every_status_is_drawn_until_the_run_is_over() -> None:
    screen, slept = io.StringIO(), list[float]()
    console = Console(file=screen, force_terminal=True, width=100, height=30)
    found = run_of(status(10, "update"), status(11, "weight_sync"))
    assert follow(found, console, interval_s=2.0, sleep=slept.append, now=lambda: 1001.0) == "run digits is over"
    text = screen.getvalue()
    assert text.index("update") < text.index("weight_sync")
    assert "30.0 s a step, 1,234 tokens/s, about 10 min left" in text
    assert "rollout/0" in text and slept == [2.0, 2.0]


def test_an_interrupt_leaves_the_run_alone() -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    console = Console(file=io.StringIO(), force_terminal=True)
    ended = follow(run_of(status(1, "update")), console, interval_s=1, sleep=interrupted, now=lambda: 1.0)
    assert ended == "the run goes on"


def test_what_is_no_terminal_is_sent_to_status() -> None:
    with pytest.raises(PreflightError, match="mobula status"):
        show_top(RUN, Console(file=io.StringIO()), interval_s=1, timeout_s=10)


@pytest.mark.parametrize(("seconds", "shown"), [(40, "40 s"), (700, "12 min"), (18_800, "5.2 h")])
def test_times_are_shown_in_units_that_fit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
