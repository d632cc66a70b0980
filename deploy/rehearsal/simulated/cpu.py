"""CpuMeter: the CPU seconds of this thread, without those of the simulation."""

from __future__ import annotations

import time


class CpuMeter:
    """Measures the driver's code: the CPU time of the thread, less the time inside `with meter:`.

    The simulated parts of a rehearsal enter the meter while they compute. Entries do not nest.
    """

    def __init__(self) -> None:
        self._started_s = time.thread_time()
        self._simulation_s = 0.0
        self._entered_s: float | None = None

    def __enter__(self) -> None:
        self._entered_s = time.thread_time()

    def __exit__(self, *error: object) -> None:
        if self._entered_s is not None:
            self._simulation_s += time.thread_time() - self._entered_s
            self._entered_s = None

    @property
    def driver_s(self) -> float:
        return time.thread_time() - self._started_s - self._simulation_s

    @property
    def simulation_s(self) -> float:
        return self._simulation_s
