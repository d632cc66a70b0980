"""Processes that run reward functions of the user, with deadlines."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from mobula.cluster.errors import DeadlineError, RewardError, WorkerDiedError
from mobula.cluster.runtime.child_process import OWN_COMMAND, ChildProcess
from mobula.cluster.runtime.concurrency import DaemonThread
from mobula.rewards.contract import Outcome, TimedOutError, failure
from mobula.rewards.isolation import child, foreign

T = TypeVar("T")


class InTime:
    """Runs work in a thread, with `timeout_s` per response and a common `deadline` (`time.monotonic`).

    A thread cannot be killed. A late thread is abandoned and counted in `num_stuck` until it ends; the owner has to
    replace the process. Without timeout and deadline the work runs in the calling thread.

    Example:
        in_time = InTime(timeout_s=5)
        in_time.call(lambda: engine.read(image), "the OCR engine")
    """

    def __init__(self, *, timeout_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._thread: DaemonThread | None = None
        self._late: list[Future[Any]] = []
        self.deadline = math.inf

    @property
    def num_stuck(self) -> int:
        """Number of late threads that still run."""
        self._late = [future for future in self._late if not future.done()]
        return len(self._late)

    def call(self, work: Callable[[], T], what: str, num_responses: int = 1) -> T:
        """Returns the result of `work`, which scores `num_responses` responses. Errors of `work` are raised
        unchanged."""
        timeout_s = min(num_responses * self._timeout_s, self.deadline - time.monotonic())
        if timeout_s == math.inf:
            return work()
        if timeout_s <= 0:
            raise TimedOutError(f"no time was left for {what}")
        self._thread = self._thread or DaemonThread("reward-in-time")
        future = self._thread.submit(work)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if future.done():  # a TimeoutError of the work itself
                raise
            self._late.append(future)
            self._thread = None  # the next work gets a new thread
            raise TimedOutError(f"waited {timeout_s:.3g} s for {what}") from None


MEMORY_LIMIT_BYTES = 4 * 2**30  # a huge expression in an answer must not take the memory of the engines


@dataclass(frozen=True)
class _Import:
    target: str
    until: float  # deadline (`time.monotonic`)


class IsolatedProcess:
    """Runs `module:function` outside this process, one call at a time.

    The process starts at the first call and again after a killed call, so a hanging call costs its own timeout only.
    `deadline` (`time.monotonic`) bounds every wait; the owner sets it.

    Example:
        isolated = IsolatedProcess(timeout_s=5, start_timeout_s=60)
        isolated.call("math:factorial", 5)  # 120
    """

    def __init__(self, *, timeout_s: float, start_timeout_s: float, python: str = "") -> None:
        """`python` runs functions with other packages, by `foreign.py`, without a limit of memory."""
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._child = ChildProcess(
            env={"PYTHONPATH": _path_of_users()} if python else None,
            memory_limit_bytes=MEMORY_LIMIT_BYTES,
            command=(python, foreign.__file__) if python else OWN_COMMAND,
        )
        self._loaded: set[str] = set()
        self._importing: _Import | None = None
        self.deadline = math.inf

    @property
    def is_running(self) -> bool:
        return self._child.is_running

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `target(*args, **kwargs)`. Arguments and result are pickled; a coroutine is awaited.
        The import of the target's module has `start_timeout_s`, the call `timeout_s`. An import that still runs at the
        deadline is not killed: a later call waits for it."""
        return self._called(1, target, args, kwargs)

    def call_batch(self, target: str, batch: Sequence[Any], **kwargs: Any) -> Any:
        """Returns the result of `target(batch, **kwargs)`, with `timeout_s` for each entry."""
        return self._called(len(batch), target, (list(batch),), kwargs)

    def _called(self, num: int, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._load(target, args, kwargs)  # with the arguments: unpickling them imports modules, too
        timeout_s = max(0.0, min(num * self._timeout_s, self.deadline - time.monotonic()))
        with self._failures(target):
            try:
                succeeded, result = self._child.call(timeout_s, child.call, target, args, kwargs)
            except DeadlineError as error:
                raise TimedOutError(f"waited {timeout_s:.3g} s for {target}") from error
        if not succeeded:
            raise RewardError(f"{target} raised {result}")
        return result

    def load(self, target: str, *examples: Any) -> None:
        """Imports the modules of the target and of the examples' classes within `start_timeout_s`, ahead of calls."""
        self._load(target, examples, {})

    def call_many(self, target: str, calls: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """Runs calls one after the other. Returns the result of each, or its `RewardError`."""
        return [self.call_or_error(target, args, kwargs) for args in calls]

    def call_or_error(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like `call`, but returns a `RewardError` instead of raising it."""
        try:
            return self.call(target, *args, **kwargs)
        except RewardError as error:
            return error

    def close(self) -> None:
        """Ends the process; a later call starts a new process."""
        self._child.close()
        self._loaded.clear()
        self._importing = None

    def _load(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        while target not in self._loaded:
            what = f"{target} to be imported"
            with self._failures(what):
                if self._importing is None:
                    self._child.send(self._start_timeout_s, child.load, target, args, kwargs)
                    self._importing = _Import(target, time.monotonic() + self._start_timeout_s)
                asked = self._importing
                succeeded, result = self._import_reply(asked)
            self._importing = None
            if succeeded:
                self._loaded.add(asked.target)
            elif asked.target == target:
                raise RewardError(f"{what} raised {result}")

    def _import_reply(self, asked: _Import) -> tuple[bool, Any]:
        waited_s = max(0.0, min(asked.until, self.deadline) - time.monotonic())
        try:
            reply: tuple[bool, Any] = self._child.receive(waited_s)
        except DeadlineError as error:
            if time.monotonic() < asked.until:
                late = f"waited {waited_s:.3g} s for {asked.target}, which is still being imported"
                raise _StillImportingError(late) from error
            raise TimedOutError(f"waited {self._start_timeout_s:.3g} s for {asked.target} to be imported") from error
        return reply

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Ends the process after a failed exchange: a late reply must not answer the next call."""
        try:
            yield
        except _StillImportingError:
            raise  # the next call waits for this reply
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerDiedError):
                raise RewardError(f"{what}: {error}") from error
            if isinstance(error, RewardError) or not isinstance(error, Exception):
                raise
            # Pickling runs code of the classes of arguments and result, which may raise anything.
            raise RewardError(f"{what}: cannot be sent or read, {type(error).__name__}: {error}") from error


def _path_of_users() -> str:
    """The PYTHONPATH without installed packages, which are of another Python."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in paths if not path.endswith("-packages"))


class _StillImportingError(TimedOutError):
    """The deadline of a call passed while a module was imported for it."""


def call_each(
    isolated: Isolated, target: str, calls: Sequence[tuple[Any, ...]], score: Callable[[Any], Any], **kwargs: Any
) -> list[Outcome | Any]:
    """Returns `score` of each call's result, or its `ScoringFailure`, in order; a pool runs the calls concurrently."""
    results = isolated.call_many(target, calls, **kwargs)
    return [failure(result) if isinstance(result, RewardError) else score(result) for result in results]


class IsolatedPool:
    """Like `IsolatedProcess`, for up to `num_processes` calls at a time. Processes start on demand.

    A thread waits for each process. The timeout of a call starts when a process takes it; `deadline`
    (`time.monotonic`) bounds all calls.

    Example:
        pool = IsolatedPool(num_processes=2, timeout_s=5, start_timeout_s=60)
        pool.call_many("math:factorial", [(5,), (-1,), (3,)])  # [120, RewardError(...), 6]
    """

    def __init__(self, *, num_processes: int, timeout_s: float, start_timeout_s: float, python: str = "") -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes={num_processes}: at least one process has to make the calls")
        self._processes = [
            IsolatedProcess(timeout_s=timeout_s, start_timeout_s=start_timeout_s, python=python)
            for _ in range(num_processes)
        ]
        self.deadline = math.inf

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        self._processes[0].deadline = self.deadline
        return self._processes[0].call(target, *args, **kwargs)

    def call_batch(self, target: str, batch: Sequence[Any], **kwargs: Any) -> Any:
        self._processes[0].deadline = self.deadline
        return self._processes[0].call_batch(target, batch, **kwargs)

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
        for process in self._processes:
            process.deadline = self.deadline
        with ThreadPoolExecutor(len(self._processes)) as threads:
            list(threads.map(lambda process: process.load(target, *examples), self._processes))

    def close(self) -> None:
        for process in self._processes:
            process.close()


Isolated = IsolatedProcess | IsolatedPool
"""Runs `module:function` outside this process: one call at a time, or several."""
