"""Why the process of a Ray actor ended, as far as Ray and the logs on this node say."""

from __future__ import annotations

import re
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from cluster.errors import WorkerDiedError
from cluster.failures import at_frames, frames_in
from cluster.status import COLOUR

NUM_LOG_LINES = 40  # of the end of a worker's log that go into the run's log
EXIT = re.compile(r"Worker exit type: (\w+)\s+Worker exit detail: (.*?)(?:\s*Some common causes include|$)", re.DOTALL)
PROCESS_ID = re.compile(r"^\s*pid: (\d+)$|\(pid=(\d+)", re.MULTILINE)
LOST_CONNECTION = "connection error"  # how Ray describes a process that ended without saying so


def actor_death(error: RayActorError, what: str) -> WorkerDiedError:
    """One line that names the cause; what Ray and the worker's own log say in full is its note."""
    text = COLOUR.sub("", str(error)).strip()
    log = _log_of(text)
    where = "" if log is None else f"; its log is {log}"
    died = WorkerDiedError(f"its actor died while waiting for {what}: {_cause(error, text)}{where}")
    died.add_note(text)
    if log is not None:
        died.add_note(f"The end of {log}:\n{_end_of(log)}")
    return died


def _cause(error: RayActorError, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if error.actor_init_failed:
        return f"{lines[-1]}{at_frames(frames_in(text))}"
    if (found := EXIT.search(text)) is None:
        return lines[-1] if lines else type(error).__name__
    kind, detail = found[1], " ".join(found[2].split())
    if LOST_CONNECTION not in detail:
        return f"Ray: {kind}, {detail}"
    process_id = _process_id(text)
    process = "its process" if process_id is None else f"its process {process_id}"
    return f"{process} was killed (SIGKILL, or out of memory) or crashed (Ray: {kind}, {detail.rstrip('.')})"


def _process_id(text: str) -> str | None:
    found = PROCESS_ID.search(text)
    return None if found is None else found[1] or found[2]


def _log_of(text: str) -> Path | None:
    """What the process wrote to stderr, if it ran on this node and wrote anything."""
    process_id = _process_id(text)
    if process_id is None or not ray.is_initialized():
        return None
    here = ray.get_runtime_context()
    folder = Path(here.get_temp_dir()) / here.get_session_name() / "logs"
    logs = [path for path in folder.glob(f"worker-*-{process_id}.err") if path.stat().st_size]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(COLOUR.sub("", line) for line in lines[-NUM_LOG_LINES:])
