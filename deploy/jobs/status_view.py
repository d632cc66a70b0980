"""`mobula status` and `mobula top`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mobula.cluster.errors import PreflightError, RunOverError
from mobula.cluster.workers.status import RunStatus, WorkerState, WorkerStatus
from mobula.deploy.run.run_client import RunAddress, statuses


def show_top(run: RunAddress, console: Console, *, interval_s: float, timeout_s: float) -> str:
    """Show the run until it is over or the user interrupts; returns why it ended."""
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


LATE_S = 15.0  # a driver that has not said anything for so long is busy or hangs
STATE_COLORS = {WorkerState.SERVING: "green", WorkerState.WAITING: "yellow", WorkerState.QUARANTINED: "red"}
MIB, GIB = 2**20, 2**30


def as_json(status: RunStatus) -> str:
    """The whole status as one JSON object, under the names of its fields."""
    return json.dumps(asdict(status), indent=1)


def as_table(status: RunStatus, now: float) -> RenderableType:
    """The status to read; `now` is in seconds since the epoch."""
    shown: list[RenderableType] = [*_lines(status, now)]
    shown.append(_workers(status.workers) if status.workers else "there is no worker")
    if any(worker.vitals for worker in status.workers):
        shown.append(_vitals(status.workers))
    return Group(*shown)


def _lines(status: RunStatus, now: float) -> Iterator[Text]:
    progress, age_s = status.progress, now - status.posted_at
    yield _line("run", f"{status.run}, step {progress.step} of {status.total_steps}, driver {status.driver_pid}")
    yield _line("phase", f"{progress.phase}, for {progress.seconds:.1f} s")
    if progress.step_s is not None:
        left = duration(progress.step_s * max(0, status.total_steps - progress.step))
        tokens = "" if progress.tokens_per_s is None else f", {progress.tokens_per_s:,.0f} tokens/s"
        yield _line("speed", f"{progress.step_s:.1f} s a step{tokens}, about {left} left")
    if age_s > LATE_S:
        yield Text(f"this was {age_s:.0f} s ago: the driver is busy, or hangs", style="yellow")
    in_flight, replay = status.in_flight, status.replay
    if in_flight.oldest_id is not None:
        oldest = f"{in_flight.oldest_id} for {in_flight.oldest_age_s:.1f} s"
        yield _line("sampling", f"{in_flight.num_prompts} prompts, {oldest}")
    bytes_shown = f"{replay.num_bytes / MIB:.1f} MiB"
    yield _line("replay", f"{replay.num_ready} ready, {replay.num_taken} taken, {bytes_shown}")
    if replay.oldest_id is not None:
        yield _line("oldest", f"{replay.oldest_id}, for {replay.oldest_age_s:.1f} s")
    if replay.num_rejected:
        yield _line("rejected", ", ".join(f"{reason} {n}" for reason, n in sorted(replay.num_rejected.items())))
    if status.object_store is not None:
        used, total = status.object_store.used_bytes, status.object_store.total_bytes
        lag = f"event loop up to {1000 * status.loop_lag_s:.0f} ms late"
        yield _line("driver", f"{lag}; object store {_size(used)} of {_size(total)}")
    if status.num_panels_lost:
        yield _line("control", f"started again {status.num_panels_lost} times")


def duration(seconds: float) -> str:
    """Formats seconds: 40 s, 12 min, 5.2 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _line(label: str, text: str) -> Text:
    return Text.assemble((f"{label:<9}", "bold"), text)


def _workers(workers: tuple[WorkerStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "in flight", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("detail", ratio=1, overflow="fold")
    for worker in workers:
        table.add_row(
            worker.name,
            Text(worker.state, style=STATE_COLORS[worker.state] if worker.state in STATE_COLORS else ""),
            "-" if worker.version is None else str(worker.version),
            str(worker.num_in_flight),
            str(worker.num_restarts),
            Text(worker.detail),
        )
    return table


def _vitals(workers: tuple[WorkerStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "node"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "KV", "runs", "queue", "busy", "RSS", "GPU", "GPU mem"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        if (vitals := worker.vitals) is None:
            continue
        load = vitals.load
        table.add_row(
            worker.name,
            vitals.node,
            "-" if vitals.tokens_per_s is None else f"{vitals.tokens_per_s:.0f}",
            _percent(None if load is None else load.kv_usage),
            "-" if load is None else str(load.num_running),
            "-" if load is None else str(load.num_waiting),
            _percent(vitals.busy_share),
            _size(vitals.rss_bytes),
            _percent(vitals.gpu_busy_share),
            _size(vitals.gpu_bytes),
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / GIB:.1f}G" if num_bytes >= GIB else f"{num_bytes / MIB:.0f}M"
