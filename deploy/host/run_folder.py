"""Run folder: its lock, its creation, and the record by which other processes find the run."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn
from uuid import uuid4

import yaml

from mobula.cluster.environment_variables import environment_variables
from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE
from mobula.configs.load import dump_config
from mobula.configs.schema import RunConfig
from mobula.configs.schema.run import LATEST
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


# Finds a running run from outside: the mark on its processes, and the record of its cluster's address.
#
# The record, `cluster.json`, lies in the run folder while the run goes on and is removed at its end. A private
# cluster has a copy in its Ray session folder, so that it is found even if the run folder is gone. A record whose
# driver is dead is what a killed run left behind.

RUN_VARIABLE = "MOBULA_RUN"
DRIVER_VARIABLE = "MOBULA_DRIVER"
RECORD_FILE = "cluster.json"  # of the run folder
SESSION_FILE = "mobula.json"  # of the Ray session folder


@dataclass(frozen=True)
class RunMark:
    """Variables in the environment of every process that a run starts, also of a child that left its process group."""

    run_id: str  # NAME/UUID
    driver: ProcessId

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RunMark:
        return cls(environment[RUN_VARIABLE], ProcessId.parse(environment[DRIVER_VARIABLE]))

    @property
    def environment(self) -> dict[str, str]:
        return {RUN_VARIABLE: self.run_id, DRIVER_VARIABLE: str(self.driver)}


@contextmanager
def marking(run: str) -> Iterator[RunMark]:
    """Marks every process that this process starts while the body runs. Nested calls for one run have one mark."""
    driver = ProcessId.of(os.getpid())
    assert driver is not None, "this process has an entry in /proc"
    run_id = os.environ.get(RUN_VARIABLE, "")
    if os.environ.get(DRIVER_VARIABLE) != str(driver) or run_id.rpartition("/")[0] != run:
        run_id = f"{run}/{uuid4().hex}"
    mark = RunMark(run_id, driver)
    with environment_variables(mark.environment):
        yield mark


@dataclass(frozen=True)
class RunRecord:
    run: str
    run_folder: Path
    mark: RunMark
    address: str  # of Ray's control store, HOST:PORT
    namespace: str
    session_folder: Path | None  # of a private cluster

    @property
    def paths(self) -> tuple[Path, ...]:
        copies = () if self.session_folder is None else (self.session_folder / SESSION_FILE,)
        return (self.run_folder / RECORD_FILE, *copies)

    def write(self, path: Path) -> None:
        folder = None if self.session_folder is None else str(self.session_folder)
        texts = {"mark": self.mark.environment, "run_folder": str(self.run_folder), "session_folder": folder}
        write_atomically(path, json.dumps(asdict(self) | texts, indent=1))

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            folder = fields["session_folder"]
            return cls(
                run=fields["run"],
                run_folder=Path(fields["run_folder"]),
                mark=RunMark.of(fields["mark"]),
                address=fields["address"],
                namespace=fields["namespace"],
                session_folder=None if folder is None else Path(folder),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no record of a run ({error!r}): remove it") from error


@contextmanager
def recorded(record: RunRecord) -> Iterator[None]:
    for path in record.paths:
        record.write(path)
    try:
        yield
    finally:
        for path in record.paths:
            path.unlink(missing_ok=True)


# The run folder: locked by one process, checked for writing before the start, filled once the start is accepted.
#
# A start that is refused leaves neither a folder nor a `latest` that points to it. A start that goes on from a
# checkpoint replaces `config.yaml` once the checkpoint is loaded: until then the file describes the checkpoints that
# are there.

CHECKPOINTS_FOLDER = "checkpoints"  # of the run folder


def check_run_folder(config: RunConfig) -> None:
    """Checks that the run folder can be written; removes the files of the check."""
    folder = config.run_folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise _unwritable(config, error) from error


@contextmanager
def file_access(config: RunConfig, *folders: Path) -> Iterator[None]:
    """Gives the files that are made while the body runs the modes of `folder_access`, and those that `folders` have."""
    before = os.umask(config.umask)
    try:
        for folder in folders:
            _change_modes(folder, config.umask)
        yield
    finally:
        os.umask(before)


@contextmanager
def held_run_folder(config: RunConfig) -> Iterator[None]:
    """Locks the run folder for the body, with the modes of `file_access`. Removes a new folder that stays empty."""
    with ExitStack() as stack:
        stack.enter_context(file_access(config))
        try:
            stack.enter_context(run_lock(config.run_folder))
            _change_modes(config.run_folder, config.umask)
        except OSError as error:
            raise _unwritable(config, error) from error
        yield


@contextmanager
def run_folder(config: RunConfig) -> Iterator[None]:
    """Fills the locked run folder and points `latest` at it. Undone if the body refuses the start of a new run."""
    latest = config.folder / LATEST
    before = os.readlink(latest) if latest.is_symlink() else None
    is_new = _content(config.run_folder) == []
    try:
        make_run_folder(config)
        yield
    except PreflightError:
        has_begun = (config.run_folder / CHECKPOINTS_FOLDER).exists()
        if is_new and not has_begun:
            _undo(config, before)
        raise


def make_run_folder(config: RunConfig) -> None:
    """Create the run folder, write the configuration into it if it has none, and point `latest` at it."""
    folder = config.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CONFIG_FILE).is_file():
            write_config(config)
        _point_latest_at(config, folder.name)
    except OSError as error:
        raise _unwritable(config, error) from error


def write_config(config: RunConfig) -> None:
    """Writes the configuration into the run folder; replaces the file of an earlier part of the run."""
    write_atomically(config.run_folder / CONFIG_FILE, dump_config(config))


def written_config(config: RunConfig) -> dict[str, Any]:
    """Reads the configuration of the run's earlier part; empty if there is none or it cannot be read."""
    try:
        config_values = yaml.safe_load((config.run_folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config_values if isinstance(config_values, dict) else {}


def _point_latest_at(config: RunConfig, name: str) -> None:
    link = config.folder / f".latest-{os.getpid()}"
    link.symlink_to(name, target_is_directory=True)
    try:
        link.replace(config.folder / LATEST)
    except OSError:
        link.unlink()
        raise


def _change_modes(folder: Path, umask: int) -> None:
    """Gives the owner's rights to the group where `umask` admits it, and takes those of others; follows no links."""
    for place, _, names in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            mode = os.lstat(path).st_mode
            wanted = stat.S_IMODE(mode & ~0o077 | (mode & 0o700) >> 3 & ~umask)
            if wanted != stat.S_IMODE(mode) and not stat.S_ISLNK(mode):
                os.chmod(path, wanted)


def _content(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != LOCK_FILE] if folder.is_dir() else []


def _undo(config: RunConfig, latest: str | None) -> None:
    for path in _content(config.run_folder):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    link = config.folder / LATEST
    if latest is not None:
        _point_latest_at(config, latest)
    elif link.is_symlink():
        link.unlink()


def _unwritable(config: RunConfig, error: OSError) -> PreflightError:
    return PreflightError(
        f"the run folder {config.run_folder} cannot be written ({error}): set folder or name to another"
    )
