"""Runs one function over many tasks in a few processes and gives the results in the order of the tasks."""

from __future__ import annotations

import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from mobula.cluster.errors import DeadlineError, WorkerDiedError

Task = TypeVar("Task")
Result = TypeVar("Result")

AHEAD = 3  # tasks a process that are given out or finished beyond the one whose turn it is
_END_S = 5.0  # how long a killed process may take to be collected


class Pulse:
    """When any process last got on with its task: it is shared with those that are forked later."""

    def __init__(self) -> None:
        self._at = multiprocessing.RawValue("d", -math.inf)

    @property
    def at(self) -> float:
        """On `time.monotonic`'s clock."""
        return self._at.value

    def beat(self) -> None:
        self._at.value = time.monotonic()


def run_in_order(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    num_processes: int,
    timeout_s: float,
    may_hang: bool = False,
    pulse: Pulse | None = None,
    is_spent: Callable[[], bool] = lambda: False,
) -> Iterator[Result]:
    """`function(task)` for each task, in order; an error of the function is raised here.

    The processes are copies of this one, so the function need not be picklable; with one of them everything happens in
    this process, unless the function `may_hang`: only another process can be stopped. They end with the iterator,
    however it ends. A process that reports `is_spent` after a task is replaced.

    Raises:
        WorkerDiedError: a process ended before its task was done.
        DeadlineError: no process finished a task for `timeout_s`, nor did `pulse` beat.
    """
    num_processes = min(num_processes, len(tasks))
    if num_processes < (1 if may_hang else 2):
        yield from map(function, tasks)
        return
    workers = _WorkerProcesses(function, tasks, num_processes, timeout_s, pulse or Pulse(), is_spent)
    try:
        yield from workers.results()
    finally:
        workers.close()


class _WorkerProcesses:
    """The processes of one `run_in_order`."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        tasks: Sequence[Any],
        num: int,
        timeout_s: float,
        pulse: Pulse,
        is_spent: Callable[[], bool],
    ) -> None:
        self._function = function
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._pulse = pulse
        self._is_spent = is_spent
        self._members: dict[Connection, BaseProcess] = {}
        self._busy: dict[Connection, int] = {}  # the place of the task that it has
        self._next = 0
        for _ in range(num):
            self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        work = (self._function, self._is_spent, self._tasks, theirs)
        process = context.Process(target=_serve, args=work, daemon=False)
        process.start()
        theirs.close()
        self._members[ours] = process

    def results(self) -> Iterator[Any]:
        finished: dict[int, Any] = {}
        for connection in self._members:
            self._give(connection, 0)
        for turn in range(len(self._tasks)):
            while turn not in finished:
                for connection in self._ready():
                    place = self._busy.pop(connection)
                    finished[place] = self._take(connection, place)
                for connection in self._members.keys() - self._busy.keys():
                    self._give(connection, turn)
            yield finished.pop(turn)
            for connection in self._members.keys() - self._busy.keys():
                self._give(connection, turn + 1)

    def _give(self, connection: Connection, turn: int) -> None:
        """The next task, unless results would pile up behind the one whose turn it is."""
        if self._next < len(self._tasks) and self._next - turn < AHEAD * len(self._members):
            self._busy[connection] = self._next
            try:
                connection.send(self._next)
            except OSError as error:  # it is gone; what it had is named
                raise self._died(connection, self._next) from error
            self._next += 1

    def _ready(self) -> list[Connection]:
        asked = time.monotonic()
        while not (ready := wait(list(self._busy), timeout=max(0.0, self._left_s(asked)))):
            if self._left_s(asked) > 0:  # another process made progress meanwhile
                continue
            names = ", ".join(str(self._tasks[place]) for place in self._busy.values())
            raise DeadlineError(f"no process finished within {self._timeout_s:g} s: {names}; look for what hangs there")
        return ready

    def _left_s(self, asked: float) -> float:
        return max(asked, self._pulse.at) + self._timeout_s - time.monotonic()

    def _take(self, connection: Connection, place: int) -> Any:
        try:
            is_done, result, is_spent = connection.recv()
        except EOFError as error:
            raise self._died(connection, place) from error
        if is_spent:
            self._end({connection: self._members.pop(connection)})
            if self._next < len(self._tasks):
                self._start()
        if is_done:
            return result
        raise result

    def _died(self, connection: Connection, place: int) -> WorkerDiedError:
        process = self._members[connection]
        process.join(_END_S)
        return WorkerDiedError(
            f"the process for {self._tasks[place]} ended with code {process.exitcode}: it ran out of memory or was "
            "killed, try again with fewer processes"
        )

    def close(self) -> None:
        self._end(self._members)

    def _end(self, members: Mapping[Connection, BaseProcess]) -> None:
        for connection, process in members.items():
            connection.close()
            process.kill()
        for process in members.values():
            process.join(_END_S)


def _serve(
    function: Callable[[Any], Any], is_spent: Callable[[], bool], tasks: Sequence[Any], connection: Connection
) -> None:
    """A process's life: one task after the other until its parent hangs up."""
    gc.disable()  # records refer to nothing that refers to them, and looking for cycles among them costs a fifth
    while True:
        try:
            place = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(tasks[place]))
        except Exception as error:  # it travels to the parent, which raises it
            answer = (False, error)
        connection.send((*answer, is_spent()))
