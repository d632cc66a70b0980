"""Wait until the processes of a benchmark have nothing left to do."""

from __future__ import annotations

import time

import psutil

from mobula.cluster.errors import MobulaError

LOOK_S = 0.5
IDLE_CORES = 0.3  # Ray's own processes take about a tenth of a core
TIMEOUT_S = 120.0


def wait_until_idle() -> None:
    """Until all processes below this one together use less than IDLE_CORES of a core.

    Raises:
        MobulaError: they are busy for longer than TIMEOUT_S.
    """
    deadline = time.monotonic() + TIMEOUT_S
    before = _seconds_used()
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = _seconds_used()
        used = sum(seconds - before.get(pid, 0.0) for pid, seconds in now.items())
        if used < IDLE_CORES * LOOK_S:
            return
        before = now
    raise MobulaError(f"the engines are still busy {TIMEOUT_S:g} s after the loop paused: nothing can be measured")


def _seconds_used() -> dict[int, float]:
    """Process id -> CPU seconds so far."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[process.pid] = times.user + times.system
    return found
