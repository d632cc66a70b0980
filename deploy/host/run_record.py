"""Finds a running run from outside: the mark on its processes, and the record of its cluster's address.

The record, `cluster.json`, lies in the run folder while the run goes on and is removed at its end. A private cluster
has a copy in its Ray session folder, so that it is found even if the run folder is gone. A record whose driver is dead
is what a killed run left behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from mobula.cluster.environment_variables import environment_variables
from mobula.deploy.host.processes import ProcessId

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
        """The mark of a process.

        Raises:
            KeyError, ValueError: it has none that we wrote.
        """
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
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self) | texts, indent=1), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Reads the record that `write` wrote.

        Raises:
            OSError: it is not there or cannot be read.
            ValueError: it holds something else.
        """
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
