"""A worker in a process of its own, with its own environment and cores, that answers one job after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from mobula.cluster.runtime.child_process import ChildProcess

Job = TypeVar("Job")
Answer = TypeVar("Answer")
Worker = Callable[[Job], Answer]

TIMEOUT_S = 600.0
NICENESS = 15  # Ray runs its workers so by default: where something else is busy, both sides have to wait alike
_built: list[Worker[Any, Any]] = []  # the one worker of this process


class Peer(Generic[Job, Answer]):
    """The other process as this one sees it; jobs are answered in order."""

    def __init__(self, child: ChildProcess) -> None:
        """`child` has been sent `_build`, whose reply is not read yet."""
        self._child = child
        self._is_built = False

    def send(self, job: Job) -> None:
        self._child.send(TIMEOUT_S, _work, job)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Answer:
        """The answer to the oldest job.

        Raises:
            DeadlineError: it is still at work.
            WorkerDiedError, RaisedError: it failed.
        """
        if not self._is_built:
            self._child.receive(timeout_s)
            self._is_built = True
        answer: Answer = self._child.receive(timeout_s)
        return answer

    def ask(self, job: Job) -> Answer:
        self.send(job)
        return self.receive()


@contextmanager
def apart(
    build: Callable[..., Worker[Job, Answer]],
    *args: Any,
    cores: Sequence[int] = (),
    env: Mapping[str, str],
) -> Iterator[Peer[Job, Answer]]:
    """Run `build(*args)` in a fresh process and hand it jobs while the body runs.

    `cores` are positions among the cores that this process may use (none: all of them). `build` is a function at the
    top of its module; it sees `env` before anything is imported that reads it.
    """
    usable = sorted(os.sched_getaffinity(0))
    bound = [usable[core] for core in cores] or usable
    with ChildProcess(env=env) as child:
        child.call(TIMEOUT_S, _take_cores, bound)  # by itself: what is unpickled next imports torch
        child.send(TIMEOUT_S, _build, build, args)  # without waiting: workers of one process group build together
        yield Peer(child)


def _take_cores(cores: Sequence[int]) -> None:
    os.nice(NICENESS)
    os.sched_setaffinity(0, cores)


def _build(build: Callable[..., Worker[Any, Any]], args: tuple[Any, ...]) -> None:
    _built.append(build(*args))


def _work(job: Any) -> Any:
    return _built[0](job)
