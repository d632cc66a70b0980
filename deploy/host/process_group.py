"""Runs a program in a new process group, with a log file and a timeout, and ends the group with it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

from mobula.cluster.runtime.error_text import COLOUR

HEEDS_WITHIN_S = 10.0  # after SIGTERM; then SIGKILL
TAIL_BYTES = 64 << 10


def run_logged(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    timeout_s: float,
) -> int:
    """Run `words` in `folder` with both outputs in `log`; its exit code, negative for a signal.

    The program's process group is gone on return, and after an error.

    Raises:
        TimeoutError: the program ran longer than `timeout_s`.
    """
    with log.open("wb") as file:
        process = Popen(
            command, env=environment, cwd=folder, stdin=DEVNULL, stdout=file, stderr=STDOUT, start_new_session=True
        )
    handle = os.pidfd_open(process.pid)
    try:
        if not _ends_within(handle, timeout_s):
            raise TimeoutError(f"{command[0]} was not done within {timeout_s:g} s")
    finally:
        _end_group(process.pid, handle)
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


def _end_group(pid: int, handle: int) -> None:
    """Ends the rest of the group. The leader is not reaped yet, so the group id cannot be reused."""
    if not _ends_within(handle, 0.0):
        os.killpg(pid, signal.SIGTERM)
        _ends_within(handle, HEEDS_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _ends_within(handle: int, timeout_s: float) -> bool:
    ended, _, _ = select.select([handle], [], [], timeout_s)  # a pidfd becomes readable when its process ends
    return bool(ended)
