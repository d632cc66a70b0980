"""A process of its own for reward functions that may hang: each call has a deadline and is killed at it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
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

    def close(self) -> None:
        """End every process; a later call starts new ones."""
        ...


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    connection: Connection
    loaded: set[str] = field(default_factory=set)

    def kill(self) -> int:
        """End the process now and collect it, so that no zombie stays; returns its exit code."""
        self.connection.close()
        self.process.kill()
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
        """The result of `target(*args, **kwargs)`; arguments and result are pickled.

        Importing the target's module has `start_timeout_s`, the call itself `timeout_s`.

        Raises:
            TimedOutError: no result in time; the process was killed.
            RewardError: the target raised, or its process died.
        """
        child = self._child = self._child or _start()
        if target not in child.loaded:  # the arguments go along: to unpickle them is to import as well
            self._exchange(child, (False, target, args, kwargs), self._start_timeout_s, f"{target} to be imported")
            child.loaded.add(target)
        return self._exchange(child, (True, target, args, kwargs), self._timeout_s, target)

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

    def _exchange(self, child: _Child, message: tuple[Any, ...], timeout_s: float, what: str) -> Any:
        timeout_s = max(0.0, min(timeout_s, self.deadline - time.monotonic()))
        try:
            child.connection.send((*message, timeout_s))
            if not child.connection.poll(timeout_s):
                raise TimedOutError(f"waited {timeout_s:.3g} s for {what}")
            succeeded, result = child.connection.recv()
        except (EOFError, OSError) as error:
            self._child = None
            raise RewardError(f"the process of {what} died with exit code {child.kill()}") from error
        except RewardError:
            self.close()  # a late reply may not answer the next call
            raise
        except Exception as error:  # pickling runs code of the argument's and the result's own class
            self.close()
            raise RewardError(f"{what}: cannot be sent or read, {type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise
        if not succeeded:
            raise RewardError(f"{what} raised {result}")
        return result


def _start() -> _Child:
    """A fresh interpreter, not a fork: the parent may hold threads, an event loop or a GPU."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rewards.isolation.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    return _Child(process, ours)
