"""Ray nodes that are started as an administrator does, apart from any run, and ended by their process groups."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
END_S = 30


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def started(*words: str) -> subprocess.Popen[bytes]:
    """`ray start` with these words, in the foreground of a process group of its own."""
    ray = str(Path(sys.executable).with_name("ray"))
    common = [ray, "start", "--block", "--disable-usage-stats", "--object-store-memory=100000000"]
    return start_command([*common, *words])


def start_command(command: list[str], **env: str) -> subprocess.Popen[bytes]:
    """Any command that ends up in `ray start --block`."""
    return subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End these process groups, the newest first."""
    for process in reversed(processes):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
