"""The lock of a run folder: one process at a time writes into it, on this machine and on all that share the folder.

`run.lock` is created exclusively, which is atomic on NFS too, and names its holder. The holder sets the file's
modification time every few seconds. A holder of this machine is looked up among its processes; another one is alive if
the time changes while it is watched, so that clocks of two machines are never compared. The lock of a dead holder is
taken over.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.deploy.host.processes import ProcessId

LOCK_FILE = "run.lock"
BEAT_S = 5.0
WATCH_S = 60.0  # without a beat in which a holder of another machine is dead
SETTLE_S = 0.5  # in which another process that takes over the same lock replaces it
SLURM, RAY = "Slurm job", "job"  # of which a run may be the program
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that holds a run folder; `machine` is the boot and the process namespace its id belongs to."""

    token: str
    process: str  # ProcessId
    machine: str
    since: str  # local time
    job: str  # how its scheduler calls it; empty without one

    @classmethod
    def of_this_process(cls) -> Holder:
        process = ProcessId.of(os.getpid())
        assert process is not None, "this process has an entry in /proc"
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(secrets.token_hex(8), str(process), _machine(), since, _job(os.environ))

    @property
    def is_alive(self) -> bool | None:
        """None if it cannot be looked up from here."""
        return ProcessId.parse(self.process).is_alive if self.machine == _machine() else None

    def __str__(self) -> str:
        process = ProcessId.parse(self.process)
        job = f" ({self.job})" if self.job else ""
        return f"process {process.pid} on {process.host}{job} since {self.since}"


@contextmanager
def run_lock(folder: Path, stop: Callable[[], None] | None = None, watch_s: float = WATCH_S) -> Iterator[None]:
    """Locks `folder` while the body runs. Creates a missing folder, and removes it if it stays empty.

    Calls `stop` if another process took the lock over after `watch_s` without a heartbeat. By default this process gets
    SIGTERM.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path, ours = folder / LOCK_FILE, Holder.of_this_process()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _acquire(path, ours, watch_s)
        with _beating(path, ours, stop or _end_this_process):
            yield
    finally:
        if _read(path) == ours:
            path.unlink()
        with suppress(OSError):  # it holds something by now
            for empty in made:
                empty.rmdir()


def _acquire(path: Path, ours: Holder, watch_s: float) -> None:
    while not _create(path, ours):
        holder = _read(path)
        if _is_held(path, holder, watch_s):
            _refuse(path.parent, holder)
        if path.exists() and _read(path) == holder:
            _logger.warning("%s is taken over: %s is dead", path, holder or "its holder")
            write_atomically(path, json.dumps(asdict(ours)))
            time.sleep(SETTLE_S)
            if _read(path) == ours:
                return


def _create(path: Path, ours: Holder) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(ours)))
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _is_held(path: Path, holder: Holder | None, watch_s: float) -> bool:
    if path.exists() and not os.access(path, os.R_OK):
        return True  # another user's
    is_alive = None if holder is None else holder.is_alive
    if is_alive is not None:
        return is_alive
    _logger.warning("%s names %s: watching it for up to %g s", path, holder or "no process yet", watch_s)
    return _changes_within(path, holder, watch_s)


def _changes_within(path: Path, holder: Holder | None, watch_s: float) -> bool:
    """Whether the holder writes a heartbeat; False also if the file is removed or gets another holder."""
    first, deadline = _beat_of(path), time.monotonic() + watch_s
    while time.monotonic() < deadline:
        time.sleep(min(1.0, watch_s / 10))
        if (beat := _beat_of(path)) is None or _read(path) != holder:
            return False  # look at it again
        if beat != first:
            return True
    return False


def _beat_of(path: Path) -> int | None:
    """Returns the time of the last heartbeat. Opens the file: NFS clients refresh attributes on open."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _read(path: Path) -> Holder | None:
    """Reads the holder; None if the file is missing, incomplete or damaged."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def _beating(path: Path, ours: Holder, stop: Callable[[], None]) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            if (holder := _read(path)) is not None and holder != ours:
                _logger.error("%s was taken over by %s: this run stops", path, holder)
                stop()
                return
            with suppress(OSError):  # a full or absent disk shows elsewhere
                os.utime(path)

    thread = threading.Thread(target=beat, name="run lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(BEAT_S)


def _refuse(folder: Path, holder: Holder | None) -> NoReturn:
    how = "stop it with Ctrl-C or SIGTERM"
    if holder is not None:
        process = ProcessId.parse(holder.process)
        how = f"stop it with `{_stop_of(holder.job) or f'kill {process.pid}'}` on {process.host}"
    raise PreflightError(
        f"the folder {folder} is in use by {holder or 'another process'}: {how}, or give another one "
        "(name=... for a run)"
    )


def _stop_of(job: str) -> str:
    """Returns the command that stops a scheduler's job; empty without a job."""
    kind, _, number = job.rpartition(" ")
    return {"": "", SLURM: f"scancel {number}", RAY: f"mobula stop {number} --address http://HEAD:8265"}[kind]


def _machine() -> str:
    """Returns boot id and process namespace: process ids are unique only within both."""
    try:
        return f"{socket.gethostname()}/{BOOT_ID.read_text().strip()}/{os.readlink(PID_NAMESPACE)}"
    except OSError:
        return socket.gethostname()


def _job(environment: Mapping[str, str]) -> str:
    if number := environment.get("SLURM_JOB_ID"):
        return f"{SLURM} {number}"
    with suppress(ValueError, KeyError, TypeError):  # Ray sets it for the entrypoint of a job
        return f"{RAY} {json.loads(environment['RAY_JOB_CONFIG_JSON_ENV_VAR'])['metadata']['job_submission_id']}"
    return ""


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
