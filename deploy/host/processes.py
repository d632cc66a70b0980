"""Processes of this machine by what cannot be mistaken: a process id together with when it was started.

A bare process id is given to another process sooner or later; with its start time it names one process for ever.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
        """The process that has this id now on this machine; None if there is none, or only its zombie."""
        try:
            stat = (PROC / str(pid) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(socket.gethostname(), pid, int(fields[START_FIELD]))

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """Parses the text that `str` wrote.

        Raises:
            ValueError: it is something else.
        """
        host, pid, start_ticks = text.rsplit("/", 2)
        return cls(host, int(pid), int(start_ticks))

    def __str__(self) -> str:
        return f"{self.host}/{self.pid}/{self.start_ticks}"

    @property
    def is_here(self) -> bool:
        """Whether it is one of this machine's, so that we can tell whether it lives."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        return self.is_here and ProcessId.of(self.pid) == self


@dataclass(frozen=True)
class MarkedProcess:
    """A process that carries a variable in the environment it was started with."""

    process: ProcessId
    environment: Mapping[str, str]
    command: str


def marked_processes(variable: str) -> Iterator[MarkedProcess]:
    """Processes of this machine, and of users that we may look at, that carry `variable`."""
    for folder in PROC.iterdir():
        if folder.name.isdecimal() and (marked := _marked(int(folder.name), variable)) is not None:
            yield marked


def holders(folder: Path) -> Iterator[MarkedProcess]:
    """Processes that have a file below `folder` open and whose environment cannot be read: Ray's agents write their
    titles over it.
    """
    for process in PROC.iterdir():
        if process.name.isdecimal() and (holder := _holder(int(process.name), folder)) is not None:
            yield holder


def end(process: ProcessId, timeout_s: float) -> bool:
    """End exactly this process: SIGTERM, and SIGKILL after `timeout_s`; whether it is gone.

    Raises:
        PermissionError: it is another user's.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not process.is_alive:  # looked at only now, when the id can no longer be given to another
            return True
        return _signal(handle, signal.SIGTERM, timeout_s) or _signal(handle, signal.SIGKILL, KILLED_WITHIN_S)
    finally:
        os.close(handle)


def _signal(handle: int, number: signal.Signals, wait_s: float) -> bool:
    """Whether the process behind `handle` ended within `wait_s` of the signal."""
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([handle], [], [], wait_s)  # a pidfd becomes readable when its process ends
    return bool(ended)


def _holder(pid: int, folder: Path) -> MarkedProcess | None:
    place = PROC / str(pid)
    try:
        if (place / "environ").read_bytes().strip(b"\0"):
            return None
        files = [os.readlink(file) for file in (place / "fd").iterdir()]
        command = _command(pid)
    except OSError:  # it has ended, or belongs to another user
        return None
    process = ProcessId.of(pid) if any(file.startswith(f"{folder}/") for file in files) else None
    return None if process is None else MarkedProcess(process, {}, command)


def _command(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _marked(pid: int, variable: str) -> MarkedProcess | None:
    try:
        words = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        command = _command(pid)
    except OSError:  # it has ended, or belongs to another user
        return None
    pairs = (word.decode(errors="replace").partition("=") for word in words)
    environment = {name: value for name, separator, value in pairs if separator}
    process = ProcessId.of(pid) if variable in environment else None
    return None if process is None else MarkedProcess(process, environment, command)
