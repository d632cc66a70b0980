"""Logs of roles, and why a worker died."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from pathlib import Path

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.failures import COLOUR, Failure, frames_in

LOGS_FOLDER = "logs"  # of the run folder


FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


POINTER = "mobula: the log goes on in "  # the last line in Ray's own log of the process


def role_log(folder: Path, name: str) -> Path:
    """Returns the log file of the worker `name` (`<role>/<index>`)."""
    return folder / f"{name.replace('/', '-')}.log"


def write_to(path: Path, name: str) -> None:
    """Appends stdout, stderr and log records of this process and its children to `path`, after a line with the process
    id. A restarted worker appends to the same file.
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


# Errors after the end of an actor's process. Ray's memory monitor kills a process without a RayActorError.
PROCESS_GONE = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)


NUM_LOG_LINES = 40  # last lines of a worker's log that are copied to the run's log


TRACEBACK = "Traceback (most recent call last)"


EXCEPTION = re.compile(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit)\w*(?:: .*)?)$", re.MULTILINE)


CRASH = re.compile(r"^\*\*\* (SIG\w+) received", re.MULTILINE)  # written by Ray's signal handler to the worker's log


CRASH_STACK = "Stack (most recent call first):"


EXIT = re.compile(r"Worker exit type: (\w+)\s+Worker exit detail: (.*?)(?:\s*Some common causes include|$)", re.DOTALL)


PROCESS_ID = re.compile(r"^\s*pid: (\d+)$|\(pid=(\d+)", re.MULTILINE)


LOST_CONNECTION = "connection error"  # Ray's reason for a process that ended without a message


NODE_MEMORY = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")


KILLED = re.compile(r"\(Actor\((\w+)\).*?pid=(\d+), actual memory used=([\d.]+)GB")


NOISE = (":", "(raylet)")  # prefixes of Ray's own lines in a worker's log


MEMORY_SETTINGS = {  # role -> settings that reduce memory on the node of its process
    "rollout": ("sampler.vllm.kv_cache_bytes", "sampler.vllm.max_num_seqs", "resources.rollout.num_workers"),
    "learner": ("learner.tokens_per_microbatch", "learner.activation_checkpointing=blocks", "policy.lora.rank=16"),
    "critic": (
        "learner.tokens_per_microbatch",
        "learner.activation_checkpointing=blocks",
        "sampler.vllm.kv_cache_bytes",
    ),
    "reference": (
        "reference.scorers.quantisation=int8",
        "resources.reference.num_workers",
        "sampler.vllm.kv_cache_bytes",
    ),
    "reward": ("rewards.processes", "resources.reward.num_workers", "sampler.vllm.kv_cache_bytes"),
}


OTHER_SETTINGS = ("sampler.vllm.kv_cache_bytes", "learner.tokens_per_microbatch", "resources.rollout.num_workers")


def actor_death(error: RayError, what: str, actor_id: str | None = None) -> WorkerDiedError:
    """Returns an error with the cause in one line. Ray's full text and the end of the worker's log are its notes.

    Args:
        error: one of `PROCESS_GONE`.
        what: the call that failed; it begins with the worker's name if there is one.
        actor_id: the dead actor, in hexadecimal digits.
    """
    text = COLOUR.sub("", str(error)).strip()
    path, log = _log_of(text)
    is_out_of_memory = isinstance(error, OutOfMemoryError)
    failure = _out_of_memory(text, what, actor_id) if is_out_of_memory else _failure(error, text, log)
    where = f"; its log is {path}" if log else ""
    died = WorkerDiedError(f"its actor died while waiting for {what}: {failure}{where}")
    died.failure = failure
    died.add_note(text)
    if log:
        died.add_note("\n".join([f"The end of {path}:", *log.splitlines()[-NUM_LOG_LINES:]]))
    return died


def memory_settings(what: str) -> tuple[str, str, str]:
    """Returns three settings that reduce the memory of a role; `what` begins with the role's name."""
    return MEMORY_SETTINGS.get(what.partition("/")[0], OTHER_SETTINGS)


def _out_of_memory(text: str, what: str, actor_id: str | None) -> Failure:
    """Returns the failure of a process that Ray's memory monitor killed, with its memory, the node's, and settings."""
    killed = {actor: (pid, used) for actor, pid, used in KILLED.findall(text)}
    pid, used = killed.get(actor_id or "", next(iter(killed.values())) if len(killed) == 1 else ("", ""))
    process = f"its process {pid}, which used {used} GB," if pid else "its process"
    node = f": {found[1]} of {found[2]} GB are used" if (found := NODE_MEMORY.search(text)) is not None else ""
    first, second, third = memory_settings(what)
    return Failure(
        f"Ray ended {process} because its node is out of memory{node}; change {first}, {second} or {third}, "
        "or use a node with more memory"
    )


def _failure(error: RayError, text: str, log: str) -> Failure:
    process_id = _process_id(text)
    process = "its process" if process_id is None else f"its process {process_id}"
    if (crash := CRASH.search(log)) is not None:
        frames = frames_in(log.partition(CRASH_STACK)[2], is_innermost_first=True)
        return Failure(f"{process} crashed with {crash[1]}", frames, fingerprint="|".join([crash[1], *frames]))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if TRACEBACK in text or (isinstance(error, RayActorError) and error.actor_init_failed):
        exceptions = EXCEPTION.findall(text) or lines[-1:]
        return Failure(exceptions[-1], frames_in(text))
    if (found := EXIT.search(text)) is None:
        return Failure(_reason(lines) or type(error).__name__)
    kind, detail = found[1], " ".join(found[2].split())
    if LOST_CONNECTION in detail:
        return Failure(f"{process} ended without a word, as after SIGKILL or out of memory (Ray: {kind})")
    return Failure(f"{process} ended (Ray: {kind}, {detail.rstrip('.')})")


def _reason(lines: list[str]) -> str:
    """Returns the line of Ray's text with the reason."""
    return next((line for line in lines if line.startswith("The actor is dead because")), "".join(lines[-1:]))


def _process_id(text: str) -> str | None:
    match = PROCESS_ID.search(text)
    return None if match is None else match[1] or match[2]


def _log_of(text: str) -> tuple[Path | None, str]:
    """Returns path and text of the process's stderr; (None, "") for a process on another node."""
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
