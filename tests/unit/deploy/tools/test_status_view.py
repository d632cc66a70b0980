"""What `mobula status` and `mobula top` show: all that is known, aligned, in 80 columns; and the same as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from mobula.cluster.errors import PreflightError, RunOverError
from mobula.cluster.roles import ReplayStats
from mobula.cluster.runtime.vitals import EngineLoad, ObjectStoreUse, Vitals
from mobula.cluster.workers.status import InFlightSummary, Progress, RunStatus, WorkerState, WorkerStatus
from mobula.deploy.jobs.status_view import as_json, as_table, duration, follow, show_top
from mobula.deploy.run.run_client import RunAddress

WORKERS = (
    WorkerStatus("rollout/0", WorkerState.SERVING, 41, 12, 0),
    WorkerStatus("rollout/1", WorkerState.JOINING, 40, 0, 1, "hung: waited 60 s for rollout/1 to sample a token"),
    WorkerStatus("reference/10", WorkerState.QUARANTINED, None, 0, 5, "WorkerDiedError: " + "out of memory " * 12),
)
STATUS = RunStatus(
    run="digits-20260102-030405", progress=Progress(42, "wait_for_rollouts", 12.34), total_steps=200,
    in_flight=InFlightSummary(17, "3/1100/train-1100", 8.25),
    replay=ReplayStats(3, 8, 5 * 2**20, 61.5, {"uniform": 4, "stale": 1}, "3/1045/train-1045"), workers=WORKERS,
    num_panels_lost=1, driver_pid=4711, posted_at=1000.0,
)  # fmt: skip


def shown(status: RunStatus, now: float = 1000.5) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(as_table(status, now))
    return console.file.getvalue()


def test_everything_that_is_known_is_shown_in_80_columns() -> None:
    text = shown(STATUS)
    for part in (
        "digits-20260102-030405, step 42 of 200, driver 4711",
        "wait_for_rollouts, for 12.3 s",
        "17 prompts, 3/1100/train-1100 for 8.2 s",
        "3 ready, 8 taken, 5.0 MiB",
        "3/1045/train-1045, for 61.5 s",
        "stale 1, uniform 4",
        "started again 1 times",
        "quarantined",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_workers_stand_in_columns_and_long_details_are_folded_not_cut() -> None:
    lines = shown(STATUS).splitlines()
    [head] = [line for line in lines if line.startswith("worker")]
    [first] = [line for line in lines if line.startswith("rollout/0")]
    assert first.index("serving") == head.index("state")
    assert first.index("41") + 2 == head.index("version") + len("version")
    assert first.index("12") + 2 == head.index("in flight") + len("in flight")
    assert " ".join("".join(lines).split()).count("memory") == 12


def test_what_is_not_known_or_not_there_is_named_or_left_out() -> None:
    text = shown(replace(STATUS, in_flight=InFlightSummary(0, None, 0.0), workers=(), num_panels_lost=0))
    assert "there is no worker" in text and "tokens/s" not in text
    assert "sampling" not in text and "started again" not in text
    empty = shown(replace(STATUS, replay=ReplayStats(0, 0, 0, 0.0)))
    assert "0 ready" in empty and "oldest" not in empty and "rejected" not in empty


def test_what_workers_use_stands_below_in_80_columns() -> None:
    load = EngineLoad(0.374, 12, 3, 0, 9000)
    busy = Vitals("192.168.100.101", 7, 3 * 2**30, 0.5, 70 * 2**30, 0.93, load, 12_345.6)
    rank = WorkerStatus("learner/0", WorkerState.SERVING, 42, 1, 0, vitals=Vitals("10.0.0.2", 8, 500 * 2**20, None))
    workers = (replace(WORKERS[0], vitals=busy), WORKERS[1], rank)
    text = shown(replace(STATUS, workers=workers, loop_lag_s=0.021, object_store=ObjectStoreUse(2**29, 2**31)))
    [row] = [line for line in text.splitlines() if "192.168.100.101" in line]
    assert row.split() == "rollout/0 192.168.100.101 12346 37% 12 3 50% 3.0G 93% 70.0G".split()
    [row] = [line for line in text.splitlines() if "10.0.0.2" in line]
    assert row.split() == "learner/0 10.0.0.2 - - - - - 500M - -".split()
    assert "event loop up to 21 ms late; object store 512M of 2.0G" in text
    assert sum(line.startswith("rollout/1") for line in text.splitlines()) == 1
    assert max(len(line) for line in text.splitlines()) <= 80


def test_an_old_status_is_marked_as_old() -> None:
    assert "this was 90 s ago: the driver is busy, or hangs" in shown(STATUS, now=1090)
    assert "ago" not in shown(STATUS)


def test_the_json_holds_every_field() -> None:
    fields = json.loads(as_json(STATUS))
    progress = {"step": 42, "phase": "wait_for_rollouts", "seconds": 12.34, "step_s": None, "tokens_per_s": None}
    assert fields["progress"] == progress
    assert fields["replay"]["oldest_id"] == "3/1045/train-1045"
    assert fields["workers"][1]["state"] == "joining" and fields["workers"][2]["version"] is None
    assert set(fields) == set(RunStatus.__dataclass_fields__)


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


def test_times_are_shown_in_units_that_fit() -> None:
    assert [duration(seconds) for seconds in (40, 700, 18_800)] == ["40 s", "12 min", "5.2 h"]
