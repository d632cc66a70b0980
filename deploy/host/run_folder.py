"""Run folder: creation, records and listing."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
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
from mobula.deploy.host.run_lock import LOCK_FILE, run_lock

# Finds a running run from outside: the mark on its processes, and the record of its cluster's address.
#
# The record, `cluster.json`, lies in the run folder while the run goes on and is removed at its end. A private cluster
# has a copy in its Ray session folder, so that it is found even if the run folder is gone. A record whose driver is
# dead
# is what a killed run left behind.

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
        """The mark of a process."""
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
    """Address of a run's cluster."""

    run: str
    run_folder: Path
    mark: RunMark
    address: str  # of Ray's control store, HOST:PORT
    namespace: str
    session_folder: Path | None  # of a private cluster

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the record and of its copy."""
        copies = () if self.session_folder is None else (self.session_folder / SESSION_FILE,)
        return (self.run_folder / RECORD_FILE, *copies)

    def write(self, path: Path) -> None:
        """Writes the record atomically."""
        folder = None if self.session_folder is None else str(self.session_folder)
        texts = {"mark": self.mark.environment, "run_folder": str(self.run_folder), "session_folder": folder}
        write_atomically(path, json.dumps(asdict(self) | texts, indent=1))

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Reads the record that `write` wrote."""
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
    """Publishes the record while the body runs."""
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
# checkpoint
# replaces `config.yaml` once the checkpoint is loaded: until then the file describes the checkpoints that are there.

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
    """Locks the run folder while the body runs, with the modes of `file_access`. Removes a new folder that stays
    empty."""
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
