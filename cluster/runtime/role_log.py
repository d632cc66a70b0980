"""The log file of one worker: output of the process, child processes and libraries."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

LOGS_FOLDER = "logs"  # of the run folder
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
POINTER = "mobula: the log goes on in "  # the last line in Ray's own log of the process


def role_log(folder: Path, name: str) -> Path:
    """Returns the log file of the worker `name` (`<role>/<index>`)."""
    return folder / f"{name.replace('/', '-')}.log"


def write_to(path: Path, name: str) -> None:
    """Appends stdout, stderr and log records of this process and its children to `path`, after a line with the process
    id. A restarted worker appends to the same file.

    Raises:
        OSError: the file cannot be written on this node.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.write(f"{POINTER}{path}\n")
    sys.stderr.flush()
    os.write(descriptor, f"{opening(os.getpid())} on {socket.gethostname()}: {name}\n".encode())
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)
    logging.getLogger("mobula").setLevel(logging.INFO)


def opening(process_id: int | str) -> str:
    """Returns the first line of the part of one process."""
    return f"===== process {process_id}"


def part_of(path: Path, process_id: str) -> str:
    """Returns the part of one process in a worker's log; the whole log if the process has no part."""
    text = path.read_text(encoding="utf-8", errors="replace")
    _, marker, part = text.rpartition(f"{opening(process_id)} on ")
    return part.partition("\n")[2].partition("\n=====")[0] if marker else text
