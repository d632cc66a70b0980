"""Processes of this machine: groups, side processes, and their end."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired, run
from typing import ParamSpec, TypeVar

from mobula.cluster.errors import DeadlineError, MobulaError, WorkerDiedError
from mobula.cluster.failures import COLOUR
from mobula.cluster.runtime.child_process import ChildProcess, RaisedError

ROOT = Path(__file__).parents[2]  # of the checkout
GIT_S = 10.0
HEEDS_WITHIN_S = 10.0  # after SIGTERM; then SIGKILL
TAIL_BYTES = 64 << 10


def run_logged(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, timeout_s: float
) -> int:
    """Runs `command` in `folder` with both outputs in `log`; returns its exit code, negative for a signal. Its process
    group is gone on return, and after an error."""
    with log.open("wb") as file:
        process = Popen(
            command, env=environment, cwd=folder, stdin=DEVNULL, stdout=file, stderr=STDOUT, start_new_session=True
        )
    handle = os.pidfd_open(process.pid)
    try:
        if not _ends_within(handle, timeout_s):
            raise TimeoutError(f"{command[0]} was not done within {timeout_s:g} s")
    finally:
        # The leader is not reaped yet, so the id of its group cannot be reused.
        if not _ends_within(handle, 0.0):
            os.killpg(process.pid, signal.SIGTERM)
            _ends_within(handle, HEEDS_WITHIN_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os.close(handle)
        code = process.wait()
    return code


def last_lines(log: Path, num: int) -> list[str]:
    """Returns the last lines of a log as a terminal shows them: the last state of progress bars, no colours."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    shown = [COLOUR.sub("", line).rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in shown if line.strip()][-num:]


def checkout_commit(length: int = 40) -> str:
    """Returns the commit of this checkout, with `+` if tracked files differ from it; empty outside one."""
    commit = _git("rev-parse", f"--short={length}", "HEAD")
    return commit + ("+" if commit and _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        done = run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _ends_within(handle: int, timeout_s: float) -> bool:
    ended, _, _ = select.select([handle], [], [], timeout_s)  # a pidfd becomes readable when its process ends
    return bool(ended)


# Calls a Ray cluster from a child process, so that a dead or silent cluster costs at most a timeout.
#
# Connecting can block for minutes, and Ray's threads end the process when its cluster disappears. Both happen in the
# child process; the caller never imports ray.

P = ParamSpec("P")
T = TypeVar("T")


def in_side_process(work: Callable[P, T], timeout_s: float, what: str, *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `work(*args, **kwargs)`, a module-level function, or raises its `MobulaError`."""
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


# Identifies processes of this machine by process id and start time.
#
# The kernel reuses process ids; id and start time together are unique.

PROC = Path("/proc")
START_FIELD = 19  # of /proc/PID/stat behind the command, which may hold blanks and brackets itself
KILLED_WITHIN_S = 5.0  # after SIGKILL only a process stuck in the kernel is still there


@dataclass(frozen=True)
class ProcessId:
    """One process of one machine; `start_ticks` counts from the machine's start."""

    host: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Returns the running process with this id; None if there is none or it is a zombie."""
        try:
            stat = (PROC / str(pid) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(socket.gethostname(), pid, int(fields[START_FIELD]))

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        host, pid, start_ticks = text.rsplit("/", 2)
        return cls(host, int(pid), int(start_ticks))

    def __str__(self) -> str:
        return f"{self.host}/{self.pid}/{self.start_ticks}"

    @property
    def age_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_ticks / os.sysconf("SC_CLK_TCK")

    @property
    def is_here(self) -> bool:
        """Whether the process belongs to this machine, so that `is_alive` is known."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        return self.is_here and ProcessId.of(self.pid) == self


@dataclass(frozen=True)
class MarkedProcess:
    """A process with a variable in its initial environment."""

    process: ProcessId
    environment: Mapping[str, str]
    command: str


def marked_processes(variable: str) -> Iterator[MarkedProcess]:
    """Yields the readable processes of this machine with `variable` in their environment."""
    for pid, content, command in _readable():
        pairs = (entry.decode(errors="replace").partition("=") for entry in content.split(b"\0"))
        environment = {name: value for name, separator, value in pairs if separator}
        if variable in environment and (process := ProcessId.of(pid)) is not None:
            yield MarkedProcess(process, environment, command)


def holders(folder: Path) -> Iterator[MarkedProcess]:
    """Yields processes with an open file below `folder` and no readable environment: Ray's agents overwrite theirs with
    a process title."""
    for pid, content, command in _readable():
        if not content.strip(b"\0") and _holds(pid, folder) and (process := ProcessId.of(pid)) is not None:
            yield MarkedProcess(process, {}, command)


def _readable() -> Iterator[tuple[int, bytes, str]]:
    """Yields id, environment and command of the processes that have not ended and belong to this user."""
    for path in PROC.iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(path.name), (path / "environ").read_bytes(), words.decode(errors="replace").strip()


def _holds(pid: int, folder: Path) -> bool:
    try:
        return any(os.readlink(file).startswith(f"{folder}/") for file in (PROC / str(pid) / "fd").iterdir())
    except OSError:  # it has ended
        return False


def end(process: ProcessId, timeout_s: float) -> bool:
    """Ends a process by SIGTERM, then SIGKILL after `timeout_s`; returns whether it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not process.is_alive:  # checked after the pidfd is open: from here on the id cannot be reused
            return True
        return _signal(handle, signal.SIGTERM, timeout_s) or _signal(handle, signal.SIGKILL, KILLED_WITHIN_S)
    finally:
        os.close(handle)


def _signal(handle: int, number: signal.Signals, wait_s: float) -> bool:
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return True
    return _ends_within(handle, wait_s)
