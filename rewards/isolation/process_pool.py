"""IsolatedPool: runs calls that may hang in several processes; a hanging call costs its own timeout only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, ScoringFailure, failure_kind
from mobula.rewards.isolation.process import Isolated, IsolatedProcess


def call_each(
    isolated: Isolated, target: str, calls: Sequence[tuple[Any, ...]], score: Callable[[Any], Any], **kwargs: Any
) -> list[Outcome | Any]:
    """Returns `score` of each call's result, or its `ScoringFailure`, in order; a pool runs the calls concurrently."""
    results = isolated.call_many(target, calls, **kwargs)
    return [failure(result) if isinstance(result, RewardError) else score(result) for result in results]


def failure(error: RewardError) -> ScoringFailure:
    """Converts a `RewardError` to an outcome."""
    return ScoringFailure(failure_kind(error), str(error))


class IsolatedPool:
    """Like `IsolatedProcess`, for up to `num_processes` calls at a time. Processes start on demand.

    A thread waits for each process. The timeout of a call starts when a process takes it; `deadline`
    (`time.monotonic`) bounds all calls.

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
        """Like `IsolatedProcess.call`, in the first process."""
        self._processes[0].deadline = self.deadline
        return self._processes[0].call(target, *args, **kwargs)

    def call_many(self, target: str, calls: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """Returns `target(*args, **kwargs)` for each args in `calls`; a failed call gives its `RewardError`."""
        if len(calls) < 2 or len(self._processes) == 1:
            self._processes[0].deadline = self.deadline
            return self._processes[0].call_many(target, calls, **kwargs)
        idle: SimpleQueue[IsolatedProcess] = SimpleQueue()
        for process in self._processes:
            process.deadline = self.deadline
            idle.put(process)

        def call(args: tuple[Any, ...]) -> Any:
            process = idle.get_nowait()  # never empty: there are as many threads as processes
            try:
                return process.call_or_error(target, args, kwargs)
            finally:
                idle.put(process)

        with ThreadPoolExecutor(min(len(self._processes), len(calls))) as threads:
            return list(threads.map(call, calls))

    def load(self, target: str, *examples: Any) -> None:
        """Like `IsolatedProcess.load`, in every process, concurrently."""
        for process in self._processes:
            process.deadline = self.deadline
        with ThreadPoolExecutor(len(self._processes)) as threads:
            list(threads.map(lambda process: process.load(target, *examples), self._processes))

    def close(self) -> None:
        """Ends every process; a later call starts new processes."""
        for process in self._processes:
            process.close()
