"""Identifies processes of this machine by process id and start time.

The kernel reuses process ids; id and start time together are unique.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
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
        """Returns the running process with this id; None if there is none or it is a zombie."""
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
            ValueError: the text has another form.
        """
        host, pid, start_ticks = text.rsplit("/", 2)
        return cls(host, int(pid), int(start_ticks))

    def __str__(self) -> str:
        return f"{self.host}/{self.pid}/{self.start_ticks}"

    @property
    def age_s(self) -> float:
        """Seconds since the start of a process of this machine."""
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
    for folder in PROC.iterdir():
        if folder.name.isdecimal() and (marked := _marked(int(folder.name), variable)) is not None:
            yield marked


def holders(folder: Path) -> Iterator[MarkedProcess]:
    """Yields processes with an open file below `folder` and no readable environment: Ray's agents overwrite theirs with
    a process title.
    """
    for process in PROC.iterdir():
        if process.name.isdecimal() and (holder := _holder(int(process.name), folder)) is not None:
            yield holder


def end(process: ProcessId, timeout_s: float) -> bool:
    """Ends a process by SIGTERM, then SIGKILL after `timeout_s`; returns whether it is gone.

    Raises:
        PermissionError: the process belongs to another user.
    """
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
    """Whether the process behind `handle` ended within `wait_s` of the signal."""
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([handle], [], [], wait_s)  # a pidfd becomes readable when its process ends
    return bool(ended)


def _holder(pid: int, folder: Path) -> MarkedProcess | None:
    process_dir = PROC / str(pid)
    try:
        if (process_dir / "environ").read_bytes().strip(b"\0"):
            return None
        files = [os.readlink(file) for file in (process_dir / "fd").iterdir()]
        command = _command(pid)
    except OSError:  # it has ended, or belongs to another user
        return None
    process = ProcessId.of(pid) if any(file.startswith(f"{folder}/") for file in files) else None
    return None if process is None else MarkedProcess(process, {}, command)


def _command(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _marked(pid: int, variable: str) -> MarkedProcess | None:
    try:
        entries = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        command = _command(pid)
    except OSError:  # it has ended, or belongs to another user
        return None
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
    environment = {name: value for name, separator, value in pairs if separator}
    process = ProcessId.of(pid) if variable in environment else None
    return None if process is None else MarkedProcess(process, environment, command)
