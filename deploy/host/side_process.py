"""Calls a Ray cluster from a child process, so that a dead or silent cluster costs at most a timeout.

Connecting can block for minutes, and Ray's threads end the process when its cluster disappears. Both happen in the
child process; the caller never imports ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mobula.cluster.errors import DeadlineError, MobulaError, WorkerDiedError
from mobula.cluster.runtime.child.process import ChildProcess, RaisedError

P = ParamSpec("P")
T = TypeVar("T")


def in_side_process(work: Callable[P, T], timeout_s: float, what: str, *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `work(*args, **kwargs)`, a module-level function, or raises its `MobulaError`.

    Raises:
        DeadlineError: no result within `timeout_s`; the message names `what`.
        WorkerDiedError: the process ended without a result, or `work` raised another error.
    """
    with ChildProcess(is_silent=True) as child:  # Ray writes to both streams from its own threads
        try:
            return child.call(timeout_s, work, *args, **kwargs)
        except RaisedError as error:
            raise WorkerDiedError(str(error)) from error
        except MobulaError as error:
            if child.is_running:  # raised by the work
                raise
            if isinstance(error, DeadlineError):
                raise DeadlineError(f"waited {timeout_s:g} s for {what}") from error
            raise WorkerDiedError(f"what waited for {what}: {error}; its cluster is gone") from error
