"""Several isolated processes side by side: of many calls that may hang, each costs its own timeout and no other's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from mobula.rewards.isolation.process import IsolatedProcess


class IsolatedPool:
    """As `IsolatedProcess`, for up to `num_processes` calls at a time; a process starts when it is first needed.

    A thread waits for each process. The timeouts hold for each call from the moment at which a process takes it up;
    `deadline` (on `time.monotonic`'s clock) ends them all.

    Example:
        pool = IsolatedPool(num_processes=2, timeout_s=5, start_timeout_s=60)
        pool.call_many("math:factorial", [(5,), (-1,), (3,)])  # [120, RewardError(...), 6]
    """

    def __init__(self, *, num_processes: int, timeout_s: float, start_timeout_s: float) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes={num_processes}: at least one process has to make the calls")
        self._processes = [
            IsolatedProcess(timeout_s=timeout_s, start_timeout_s=start_timeout_s) for _ in range(num_processes)
        ]
        self.deadline = math.inf

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """As `IsolatedProcess.call`, by the first process."""
        self._processes[0].deadline = self.deadline
        return self._processes[0].call(target, *args, **kwargs)

    def call_many(self, target: str, calls: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """`target(*args, **kwargs)` for each args of `calls`, in order; a call that failed is its `RewardError`."""
        if len(calls) < 2 or len(self._processes) == 1:
            self._processes[0].deadline = self.deadline
            return self._processes[0].call_many(target, calls, **kwargs)
        idle: SimpleQueue[IsolatedProcess] = SimpleQueue()
        for process in self._processes:
            process.deadline = self.deadline
            idle.put(process)

        def call(args: tuple[Any, ...]) -> Any:
            process = idle.get_nowait()  # as many threads as processes: there is always one
            try:
                return process.call_or_error(target, args, kwargs)
            finally:
                idle.put(process)

        with ThreadPoolExecutor(min(len(self._processes), len(calls))) as threads:
            return list(threads.map(call, calls))

    def load(self, target: str, *examples: Any) -> None:
        """As `IsolatedProcess.load`, in every process, side by side."""
        for process in self._processes:
            process.deadline = self.deadline
        with ThreadPoolExecutor(len(self._processes)) as threads:
            list(threads.map(lambda process: process.load(target, *examples), self._processes))

    def close(self) -> None:
        """End every process; a later call starts new ones."""
        for process in self._processes:
            process.close()
