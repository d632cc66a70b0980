"""A worker in a process of its own, with its own environment and cores, that answers one job after another."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from cluster.errors import DeadlineError, WorkerDiedError

Job = TypeVar("Job")
Answer = TypeVar("Answer")
Worker = Callable[[Job], Answer]

STOP = None
STOP_S = 30.0
NICENESS = 15  # Ray runs its workers so by default: where something else is busy, both sides have to wait alike


class Peer(Generic[Job, Answer]):
    """The other process as this one sees it; jobs are answered in order."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def send(self, job: Job) -> None:
        self._connection.send(job)

    def receive(self, timeout_s: float = 600.0) -> Answer:
        """The answer to the oldest job.

        Raises:
            DeadlineError: it is still at work.
            WorkerDiedError: it failed; its traceback is on stderr.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise DeadlineError(f"waited {timeout_s:g} s for {self._name}")
            return self._connection.recv()
        except EOFError as error:
            raise WorkerDiedError(f"{self._name} failed: its traceback is above") from error

    def ask(self, job: Job) -> Answer:
        self.send(job)
        return self.receive()


@contextmanager
def apart(
    build: Callable[..., Worker[Job, Answer]],
    *args: Any,
    name: str,
    cores: Sequence[int] = (),
    env: Mapping[str, str],
) -> Iterator[Peer[Job, Answer]]:
    """Run `build(*args)` in a fresh process and hand it jobs while the body runs.

    `cores` are positions among the cores that this process may use (none: all of them). `build` is a function at the
    top of its module; it sees `env` before anything is imported that reads it.
    """
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    usable = sorted(os.sched_getaffinity(0))
    bound = [usable[core] for core in cores] or usable
    process = spawning.Process(target=_serve, args=(theirs, bound, build, args), name=name)
    with _environment(env):
        process.start()
    theirs.close()
    try:
        yield Peer(ours, name)
        ours.send(STOP)
        process.join(STOP_S)
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection, cores: list[int], build: Callable[..., Worker], args: tuple[Any, ...]) -> None:
    os.nice(NICENESS)
    os.sched_setaffinity(0, cores)
    work = build(*args)
    while (job := connection.recv()) is not STOP:
        connection.send(work(job))


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """A spawned process inherits the environment of its start."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
