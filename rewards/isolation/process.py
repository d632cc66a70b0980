"""A process of its own for reward functions that may hang: each call has a deadline and is killed at it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from cluster.errors import RewardError
from rewards.contract import TimedOutError


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


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    connection: Connection
    loaded: set[str] = field(default_factory=set)
    importing: _Import | None = None

    def kill(self) -> int:
        """End the process now and collect it, so that no zombie stays; returns its exit code."""
        self.connection.close()
        if self.process.returncode is None:  # not collected, so the number of its group is its own
            os.killpg(self.process.pid, signal.SIGKILL)  # with what the function has started
        return self.process.wait()


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
        self._child: _Child | None = None
        self.deadline = math.inf

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """The result of `target(*args, **kwargs)`; arguments and result are pickled, and a coroutine is awaited.

        Importing the target's module has `start_timeout_s`, the call itself `timeout_s`. An import that goes on at the
        deadline is not broken off: a later call waits for it.

        Raises:
            TimedOutError: no result in time; the process was killed, unless it still imports.
            RewardError: the target raised, or its process died.
        """
        self._load(target, args, kwargs)  # the arguments go along: to unpickle them is to import as well
        return self._call(target, args, kwargs)

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
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _load(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        child = self._child = self._child or _start()
        while target not in child.loaded:
            with self._talking(child, f"{target} to be imported"):
                if child.importing is None:
                    child.connection.send((False, target, args, kwargs, self._start_timeout_s))
                    child.importing = _Import(target, time.monotonic() + self._start_timeout_s)
                asked = child.importing
                succeeded, result = self._import_reply(child.connection, asked)
            child.importing = None
            if succeeded:
                child.loaded.add(asked.target)
            elif asked.target == target:
                raise RewardError(f"{target} to be imported raised {result}")

    def _import_reply(self, connection: Connection, asked: _Import) -> tuple[bool, Any]:
        """Waits for an import until its own end, or until the deadline."""
        waited_s = max(0.0, min(asked.until, self.deadline) - time.monotonic())
        if connection.poll(waited_s):
            return connection.recv()
        if time.monotonic() < asked.until:
            raise _StillImportingError(f"waited {waited_s:.3g} s for {asked.target}, which is still being imported")
        raise TimedOutError(f"waited {self._start_timeout_s:.3g} s for {asked.target} to be imported")

    def _call(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        child = self._child
        assert child is not None, f"{target} was loaded into a process"
        timeout_s = max(0.0, min(self._timeout_s, self.deadline - time.monotonic()))
        with self._talking(child, target):
            child.connection.send((True, target, args, kwargs, timeout_s))
            if not child.connection.poll(timeout_s):
                raise TimedOutError(f"waited {timeout_s:.3g} s for {target}")
            succeeded, result = child.connection.recv()
        if not succeeded:
            raise RewardError(f"{target} raised {result}")
        return result

    @contextmanager
    def _talking(self, child: _Child, what: str) -> Iterator[None]:
        """End the process after any failure to talk to it: a late reply may not answer the next call."""
        try:
            yield
        except _StillImportingError:
            raise  # its reply is awaited by the next call
        except (EOFError, OSError) as error:
            self._child = None
            raise RewardError(f"the process of {what} died with exit code {child.kill()}") from error
        except RewardError:
            self.close()
            raise
        except Exception as error:  # pickling runs code of the argument's and the result's own class
            self.close()
            raise RewardError(f"{what}: cannot be sent or read, {type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise


class _StillImportingError(TimedOutError):
    """The deadline of a call passed while a module was imported for it."""


def _start() -> _Child:
    """A fresh interpreter, not a fork: the parent may hold threads, an event loop or a GPU."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rewards.isolation.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    return _Child(process, ours)
