"""IsolatedProcess: runs reward functions that may hang in a child process, with a deadline for each call."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from mobula.cluster.errors import DeadlineError, RewardError, WorkerDiedError
from mobula.cluster.runtime.child.process import ChildProcess
from mobula.rewards.contract import TimedOutError
from mobula.rewards.isolation import child

MEMORY_LIMIT_BYTES = 4 * 2**30  # a huge expression in an answer must not take the memory of the engines


class Isolated(Protocol):
    """Runs `module:function` outside this process: `IsolatedProcess`, or an `IsolatedPool` of several."""

    deadline: float

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Like `IsolatedProcess.call`."""
        ...

    def call_many(self, target: str, calls: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """Returns `target(*args, **kwargs)` for each args in `calls`; a failed call gives its `RewardError`."""
        ...

    def load(self, target: str, *examples: Any) -> None:
        """Like `IsolatedProcess.load`, in every process."""
        ...

    def close(self) -> None:
        """Ends every process; a later call starts new processes."""
        ...


@dataclass(frozen=True)
class _Import:
    """An import in progress."""

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

    def __init__(self, *, timeout_s: float, start_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._child = ChildProcess(memory_limit_bytes=MEMORY_LIMIT_BYTES)
        self._loaded: set[str] = set()
        self._importing: _Import | None = None
        self.deadline = math.inf

    @property
    def is_running(self) -> bool:
        """Whether the process was started and not closed."""
        return self._child.is_running

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `target(*args, **kwargs)`. Arguments and result are pickled; a coroutine is awaited.

        The import of the target's module has `start_timeout_s`, the call `timeout_s`. An import that still runs at the
        deadline is not killed: a later call waits for it.

        Raises:
            TimedOutError: no result in time; the process was killed, unless it still imports.
            RewardError: the target raised, or its process died.
        """
        self._load(target, args, kwargs)  # with the arguments: unpickling them imports modules, too
        timeout_s = max(0.0, min(self._timeout_s, self.deadline - time.monotonic()))
        with self._failures(target):
            try:
                succeeded, result = self._child.call(timeout_s, child.call, target, args, kwargs)
            except DeadlineError as error:
                raise TimedOutError(f"waited {timeout_s:.3g} s for {target}") from error
        if not succeeded:
            raise RewardError(f"{target} raised {result}")
        return result

    def load(self, target: str, *examples: Any) -> None:
        """Imports the modules of the target and of the examples' classes within `start_timeout_s`, ahead of calls.

        Raises:
            TimedOutError: the import took longer; the process was killed.
            RewardError: the import raised, the target does not exist, or the process died.
        """
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
        """Waits for the reply of an import until its own deadline, or until `deadline`."""
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


class _StillImportingError(TimedOutError):
    """The deadline of a call passed while a module was imported for it."""
