"""Finds why the process of a Ray actor ended, from Ray and from the worker's log on this node."""

from __future__ import annotations

import re
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from cluster.errors import WorkerDiedError
from cluster.failures import Failure, frames_in
from cluster.runtime.error_text import COLOUR
from cluster.runtime.role_log import POINTER, part_of

NUM_LOG_LINES = 40  # of the end of a worker's log that go into the run's log
TRACEBACK = "Traceback (most recent call last)"
EXCEPTION = re.compile(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit)\w*(?:: .*)?)$", re.MULTILINE)
CRASH = re.compile(r"^\*\*\* (SIG\w+) received", re.MULTILINE)  # as Ray's signal handler writes it to the worker's log
CRASH_STACK = "Stack (most recent call first):"
EXIT = re.compile(r"Worker exit type: (\w+)\s+Worker exit detail: (.*?)(?:\s*Some common causes include|$)", re.DOTALL)
PROCESS_ID = re.compile(r"^\s*pid: (\d+)$|\(pid=(\d+)", re.MULTILINE)
LOST_CONNECTION = "connection error"  # how Ray describes a process that ended without a word
NOISE = (":", "(raylet)")  # how lines of a worker's log begin that Ray writes for itself


def actor_death(error: RayActorError, what: str) -> WorkerDiedError:
    """One line that names the cause; the full text of Ray and the end of the worker's own log are notes."""
    text = COLOUR.sub("", str(error)).strip()
    path, log = _log_of(text)
    failure = _failure(error, text, log)
    where = f"; its log is {path}" if log else ""
    died = WorkerDiedError(f"its actor died while waiting for {what}: {failure}{where}")
    died.failure = failure
    died.add_note(text)
    if log:
        died.add_note("\n".join([f"The end of {path}:", *log.splitlines()[-NUM_LOG_LINES:]]))
    return died


def _failure(error: RayActorError, text: str, log: str) -> Failure:
    process_id = _process_id(text)
    process = "its process" if process_id is None else f"its process {process_id}"
    if (crash := CRASH.search(log)) is not None:
        frames = frames_in(log.partition(CRASH_STACK)[2], is_innermost_first=True)
        return Failure(f"{process} crashed with {crash[1]}", frames, fingerprint="|".join([crash[1], *frames]))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if TRACEBACK in text or error.actor_init_failed:
        exceptions = EXCEPTION.findall(text) or lines[-1:]
        return Failure(exceptions[-1], frames_in(text))
    if (found := EXIT.search(text)) is None:
        return Failure(_reason(lines) or type(error).__name__)
    kind, detail = found[1], " ".join(found[2].split())
    if LOST_CONNECTION in detail:
        return Failure(f"{process} ended without a word, as after SIGKILL or out of memory (Ray: {kind})")
    return Failure(f"{process} ended (Ray: {kind}, {detail.rstrip('.')})")


def _reason(lines: list[str]) -> str:
    """The line of Ray's text that holds the reason."""
    return next((line for line in lines if line.startswith("The actor is dead because")), "".join(lines[-1:]))


def _process_id(text: str) -> str | None:
    found = PROCESS_ID.search(text)
    return None if found is None else found[1] or found[2]


def _log_of(text: str) -> tuple[Path | None, str]:
    """Path and text of the process's stderr; nothing for a process on another node, whose files are not read."""
    process_id = _process_id(text)
    path = None if process_id is None else _path_of(process_id)
    if path is None:
        return None, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    before, marker, named = text.partition(POINTER)
    if marker and (own := Path(named.partition("\n")[0])).is_file():
        path, text = own, before + part_of(own, str(process_id))
    lines = COLOUR.sub("", text).splitlines()
    return path, "\n".join(line for line in lines if line.strip() and not line.startswith(NOISE))


def _path_of(process_id: str) -> Path | None:
    if not ray.is_initialized():
        return None
    here = ray.get_runtime_context()
    folder = Path(here.get_temp_dir()) / here.get_session_name() / "logs"
    return max(folder.glob(f"worker-*-{process_id}.err"), key=lambda path: path.stat().st_mtime, default=None)
