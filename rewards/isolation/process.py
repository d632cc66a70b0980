"""A process of its own for reward functions that may hang: each call has a deadline and is killed at it."""

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

MEMORY_LIMIT_BYTES = 4 * 2**30  # a power tower in an answer must not push the run's engines out of memory


class Isolated(Protocol):
    """Runs `module:function` outside this process: `IsolatedProcess`, or an `IsolatedPool` of several."""

    deadline: float

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """As `IsolatedProcess.call`."""
        ...

    def call_many(self, target: str, calls: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """`target(*args, **kwargs)` for each args of `calls`, in order; a call that failed is its `RewardError`."""
        ...

    def load(self, target: str, *examples: Any) -> None:
        """As `IsolatedProcess.load`, in every process."""
        ...

    def close(self) -> None:
        """End every process; a later call starts new ones."""
        ...


@dataclass(frozen=True)
class _Import:
    """An import that was begun and not answered yet."""

    target: str
    until: float  # on `time.monotonic`'s clock


class IsolatedProcess:
    """Runs `module:function` outside this process, one call at a time.

    The process starts at the first call and again after a call that was killed, so one answer that hangs costs its own
    timeout. `deadline` (on `time.monotonic`'s clock) shortens every wait further; its owner moves it.

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
        """Whether the process was started, and not closed since."""
        return self._child.is_running

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """The result of `target(*args, **kwargs)`; arguments and result are pickled, and a coroutine is awaited.

        Importing the target's module has `start_timeout_s`, the call itself `timeout_s`. An import that goes on at the
        deadline is not broken off: a later call waits for it.

        Raises:
            TimedOutError: no result in time; the process was killed, unless it still imports.
            RewardError: the target raised, or its process died.
        """
        self._load(target, args, kwargs)  # the arguments go along: to unpickle them is to import as well
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
        """Import the target's module, and those of the examples' classes, within `start_timeout_s`.

        No later call has to wait for these imports.

        Raises:
            TimedOutError: it took longer; the process was killed.
            RewardError: the import raised, there is no such target, or the process died.
        """
        self._load(target, examples, {})

    def call_many(self, target: str, calls: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """One call after another: a result each, or the `RewardError` that kept it from having one."""
        return [self.call_or_error(target, args, kwargs) for args in calls]

    def call_or_error(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `call`, but what it would raise is the result."""
        try:
            return self.call(target, *args, **kwargs)
        except RewardError as error:
            return error

    def close(self) -> None:
        """End the process; a later call starts a new one."""
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
        """Waits for an import until its own end, or until the deadline."""
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
        """End the process after any failure to talk to it: a late reply may not answer the next call."""
        try:
            yield
        except _StillImportingError:
            raise  # its reply is awaited by the next call
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerDiedError):
                raise RewardError(f"{what}: {error}") from error
            if isinstance(error, RewardError) or not isinstance(error, Exception):
                raise
            # pickling runs code of the argument's and the result's own class
            raise RewardError(f"{what}: cannot be sent or read, {type(error).__name__}: {error}") from error


class _StillImportingError(TimedOutError):
    """The deadline of a call passed while a module was imported for it."""
