"""Writes the audit chain, and digests of files."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mobula.cluster.audit.chain import (
    AUDIT_FILE,
    GENESIS,
    HEAD_FILE,
    AuditKind,
    DamagedRecord,
    Head,
    SigningKey,
    encode,
    split,
)
from mobula.cluster.errors import PreflightError
from mobula.cluster.files import CHUNK_BYTES, file_sha256
from mobula.cluster.runtime.concurrency import DaemonThread

if TYPE_CHECKING:
    from hashlib import _Hash

_logger = logging.getLogger(__name__)

CHECKPOINTS, TRAJECTORIES, JOURNAL, LOGS, RUN_LOG = "checkpoints", "trajectories", "journal", "logs", "run.log"

# No record has these: the chain itself, files of a process that runs, and files that other commands write, or write
# again, after the run.
UNCOVERED_FOLDERS = ("replay", "export", "mlruns", "trackio", "wandb", "diagnosis")
UNCOVERED_FILES = (AUDIT_FILE, HEAD_FILE, "run.lock", "cluster.json", "scale.json", "report.html", "diagnosis.json")
FORMERLY_UNCOVERED = (LOGS, RUN_LOG, "tensorboard", "traces")  # by a last record without `covers_all`


def is_growing(name: str) -> bool:
    """Whether processes may append to the file after the last record, so that this has a digest of its first bytes."""
    return name == RUN_LOG or name.startswith(f"{LOGS}/")


def is_segment(name: str) -> bool:
    return name.startswith(f"{JOURNAL}/")


def files_below(folder: Path) -> Iterator[str]:
    """Yields the path of every file, in order. Links are not followed: one to a folder is a file here."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from (f"{entry.name}/{name}" for name in files_below(Path(entry.path)))
        else:
            yield entry.name


def is_uncovered(name: str) -> bool:
    """Whether no record of this version has the file, checkpoints and trajectory log aside."""
    return name in UNCOVERED_FILES or name.partition("/")[0] in UNCOVERED_FOLDERS


def recorded_files(folder: Path) -> Iterator[Path]:
    """Yields the files that a run's last record has digests of. Checkpoints and trajectory log have own records."""
    for name in files_below(folder):
        path = folder / name
        has_record = name.partition("/")[0] in (CHECKPOINTS, TRAJECTORIES)
        if not has_record and not is_uncovered(name) and path.is_file() and not path.is_symlink():
            yield path


def digests_below(folder: Path) -> Mapping[str, tuple[int, str]]:
    """Returns path -> bytes and sha256 of `recorded_files`."""
    sizes = {path: path.stat().st_size for path in recorded_files(folder)}
    return {str(path.relative_to(folder)): (size, file_sha256(path, size)) for path, size in sizes.items()}


class JournalDigests:
    """Digests of the journal's segments, which only grow: each byte is read once."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run folder."""
        self._folder = folder
        self._read: dict[str, tuple[int, _Hash]] = {}

    def now(self) -> dict[str, tuple[int, str]]:
        """Returns path -> bytes and sha256 of every segment; one in progress may end within a record."""
        read, self._read = self._read, {}
        for path in sorted((self._folder / JOURNAL).glob("*.arrows")):
            num_bytes, digest = read.get(path.name, (0, hashlib.sha256()))
            with path.open("rb") as file:
                file.seek(num_bytes)
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
            self._read[path.name] = (num_bytes, digest)
        return {f"{JOURNAL}/{name}": (num, digest.hexdigest()) for name, (num, digest) in self._read.items()}


@dataclass(frozen=True)
class Found:
    """The chain that a writer continues. The audit reads from the part's first record what was lost before it."""

    num_records: int
    torn_bytes: int  # of a last line that a killed writer had not completed; they are removed
    head: Mapping[str, Any] | None  # `audit.head` if it counts other records than the file has, else None


class ChainWriter:
    """Writes each record with one call of the system, so that a killed process leaves whole records. Any thread may
    record.

    A separate thread syncs the file to disk: after a power failure the last records may be missing. An error of the
    disk is logged and ends the chain; the run continues.
    """

    def __init__(self, folder: Path, *, close_s: float | None = None, key: SigningKey | None = None) -> None:
        """`close_s` bounds the wait of `close` for the disk, in seconds; None waits without limit. `key` signs
        records."""
        self._key = key
        self._lock = threading.Lock()
        self._close_s = close_s
        self._syncing: Future[None] | None = None
        self._thread = DaemonThread("audit")
        self.error: OSError | None = None  # after which no record was written
        self._chain: int | None = None  # file descriptor; None after an error
        self._end: int | None = None
        self.found, self.head = Found(0, 0, None), Head()
        try:
            self._open(folder)
        except OSError as error:
            self._fail(error)

    def record(self, kind: AuditKind, body: Mapping[str, Any]) -> None:
        with self._lock:
            if self._chain is None or self._end is None:
                return
            head = self.head
            line, digest = encode(head.num_records, head.sha256, time.time(), kind.value, body, self._key)
            try:
                _write_all(self._chain, line)
                self.head = Head(head.num_records + 1, head.num_bytes + len(line), digest).signed(self._key)
                os.pwrite(self._end, self.head.encoded(), 0)  # after the record: see `mobula.cluster.audit.chain`
            except OSError as error:
                self._fail(error)
                return
            if self._syncing is None or self._syncing.done():
                self._syncing = self._thread.submit(_sync, self._chain)

    def close(self) -> None:
        """Waits until every record is on disk."""
        with self._lock:
            descriptors, self._chain, self._end = [self._chain, self._end], None, None
        for descriptor in filter(None, descriptors):
            try:
                self._thread.submit(_sync, descriptor).result(self._close_s)
            except TimeoutError:
                _logger.warning("waited %g s for the disk to take %s (timeouts.stop_s)", self._close_s, AUDIT_FILE)
            else:
                os.close(descriptor)
        self._thread.shutdown(wait=False)

    def _open(self, folder: Path) -> None:
        path, end = folder / AUDIT_FILE, folder / HEAD_FILE
        content = path.read_bytes() if path.exists() else b""
        lines, torn_bytes = split(content)
        whole = len(content) - torn_bytes
        last = lines[-1].record if lines else None
        if last and last.hmac and (self._key is None or not self._key.signed(last.sha256, last.hmac)):
            raise PreflightError(
                f"{path} was signed with another key than audit.key_env has: set audit.key_env to its variable, or "
                "name=... for a new run"
            )
        # After a damaged last line the chain continues with a digest that no record has: the audit names that place.
        self.head = Head(len(lines), whole, last.sha256 if last else GENESIS).signed(self._key)
        self.found = Found(len(lines), torn_bytes, _other_head(end, self.head, content))
        self._chain = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._chain, whole)
        os.lseek(self._chain, 0, os.SEEK_END)
        self._end = os.open(end, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._end, 0)
        os.pwrite(self._end, self.head.encoded(), 0)

    def _fail(self, error: OSError) -> None:
        _logger.warning("%s cannot be written (%s): the run continues without further records in it", AUDIT_FILE, error)
        self._chain, self._end, self.error = None, None, error


def _other_head(path: Path, now: Head, content: bytes) -> Mapping[str, Any] | None:
    """Returns what `audit.head` counts, if records that it counts are missing or damaged in the file."""
    if not path.exists():
        return None if now.num_records == 0 else {"fault": "it is missing"}
    try:
        head = Head.decoded(path.read_bytes())
    except DamagedRecord as error:
        return {"fault": str(error)}
    counted, _ = split(content[: head.num_bytes])
    last = counted[-1].record if counted else None
    is_whole = len(counted) == head.num_records and (last.sha256 if last else GENESIS) == head.sha256
    return None if is_whole else asdict(head)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:  # the file is closed, or the disk is gone: the next write reports it
        _logger.debug("audit: %s", error)
