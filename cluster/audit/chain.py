"""The hash chain of a run, `audit.jsonl`: one record a line, each with the sha256 of the record before it.

    {"seq":7,"previous":"9f...","at_s":1764244751.5,"kind":"trained","body":{...},"sha256":"4c..."}

`sha256` is the digest of the line without that field, byte for byte. `audit.head` beside it has the number of records,
their bytes and the newest digest; it is written after each record. So a last line that a killed writer left half
written stands behind the bytes that `audit.head` counts, and a removed or damaged record stands before them.

With `audit.key_env` lines and head end with `hmac`, an HMAC-SHA256 of the digest: neither a record, nor a head that
counts fewer records, can be written without the key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import CHUNK_BYTES, file_sha256
from mobula.cluster.runtime.concurrency import DaemonThread

if TYPE_CHECKING:
    from hashlib import _Hash

_logger = logging.getLogger(__name__)

AUDIT_FILE = "audit.jsonl"  # in the run folder
HEAD_FILE = "audit.head"
GENESIS = "0" * 64  # the digest before the first record
_END = re.compile(rb',"sha256":"([0-9a-f]{64})"(?:,"hmac":"([0-9a-f]{64})")?}$')
_END_BYTES = 160  # the longest
HEAD_BYTES, SIGNED_HEAD_BYTES = 192, 288
MIN_KEY = 32  # characters


class SigningKey:
    """The key of `audit.key_env`. It is never shown, written or sent to another process."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def signed(self, text: str, signature: str) -> bool:
        return hmac.compare_digest(self.sign(text), signature)

    def __repr__(self) -> str:
        return "SigningKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signing key stays in its process")


@contextmanager
def signing_key(variable: str, option: str = "audit.key_env") -> Iterator[SigningKey | None]:
    """Yields the key in an environment variable, which child processes that start in the body do not get; None for an
    empty name."""
    if not variable:
        yield None
        return
    secret = os.environ.get(variable, "")
    if len(secret) < MIN_KEY:
        problem = f"has {len(secret)} characters" if secret else "is not set"
        raise PreflightError(
            f"{option}={variable}: this environment variable {problem}: put a random key of {MIN_KEY} characters or "
            "more into it, e.g. of `openssl rand -hex 32`"
        )
    del os.environ[variable]
    try:
        yield SigningKey(secret)
    finally:
        os.environ[variable] = secret


class AuditKind(StrEnum):
    """Kinds of records. A reader keeps records of unknown kinds and checks their place in the chain."""

    STARTED = "started"  # a part of the run begins: code, packages, machine, data, seeds
    RESUMED = "resumed"  # it continues from a checkpoint: later steps before this record are void
    RECOVERED = "recovered"  # the journal was repeated up to a version
    CHECKPOINT = "checkpoint"
    TRAINED = "trained"  # a step, with a digest of each of its groups
    REPEATED = "repeated"  # a step that restarted learner ranks have trained again
    RESTORED = "restored"  # learner ranks were started again from a checkpoint
    REGENERATED = "regenerated"  # a group lost with its node was read from the journal or sampled again
    PUSHED = "pushed"  # weights were sent to all engines
    ADMITTED = "admitted"  # weights were given to an engine that joined late
    LOST = "lost"  # a worker died or did not answer
    METRICS = "metrics"  # a line of metrics.jsonl, written after this record
    WRITTEN = "written"  # a file that is replaced as the run goes on, written after this record
    LOGGED = "logged"  # a step's file in the trajectory log
    GUARDED = "guarded"  # the guard warned, raised the KL coefficient or stopped the run
    ROLLED_BACK = "rolled_back"  # the guard replaced the weights of a version by those of an older checkpoint
    ENDED = "ended"  # this part is over, with the digests of its files


class DamagedRecord(ValueError):
    """A line is no record, or its bytes do not match its digest."""


@dataclass(frozen=True)
class AuditRecord:
    """One record of the chain."""

    seq: int  # from 0
    previous: str  # sha256 of the record before
    at_s: float  # seconds since the epoch
    kind: str
    body: Mapping[str, Any]
    sha256: str
    hmac: str = ""  # of sha256; empty without a key

    def __post_init__(self) -> None:
        typed = zip((self.seq, self.previous, self.kind, self.body), (int, str, str, dict), strict=True)
        if not 0 <= self.seq < 2**63 or not all(isinstance(value, kind) for value, kind in typed):
            raise TypeError("a field has another type")

    @property
    def name(self) -> str:
        version = f", version {self.body['version']}" if "version" in self.body else ""
        return f"record {self.seq} ({self.kind}{version})"


@dataclass(frozen=True)
class Head:
    """The end of the chain at one moment."""

    num_records: int = 0
    num_bytes: int = 0
    sha256: str = GENESIS
    hmac: str = ""  # of the others; empty without a key

    @property
    def text(self) -> str:
        """The text that `hmac` signs."""
        return f"head {self.num_records} {self.num_bytes} {self.sha256}"

    def signed(self, key: SigningKey | None) -> Head:
        return self if key is None else replace(self, hmac=key.sign(self.text))

    def encoded(self) -> bytes:
        """Returns a text of `HEAD_BYTES` bytes, signed of `SIGNED_HEAD_BYTES`."""
        fields = {name: value for name, value in asdict(self).items() if value != ""}
        num_bytes = SIGNED_HEAD_BYTES if self.hmac else HEAD_BYTES
        return json.dumps(fields).ljust(num_bytes - 1).encode() + b"\n"

    @classmethod
    def decoded(cls, content: bytes) -> Self:
        """Raises: DamagedRecord: the content is not as `encoded` writes it."""
        try:
            head = cls(**json.loads(content))
            are_typed = isinstance(head.num_records, int) and isinstance(head.num_bytes, int)
            is_unchanged = are_typed and head.encoded() == content
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedRecord(f"it is no end of a chain: {content[:60]!r}") from error
        if not is_unchanged:
            raise DamagedRecord("its bytes were changed")
        return head


@dataclass(frozen=True)
class Line:
    """One line of the file: a record, or the reason why it is none."""

    number: int  # from 1
    end: int  # position of the byte after it
    record: AuditRecord | None
    fault: str = ""


def encode(
    seq: int, previous: str, at_s: float, kind: str, body: Mapping[str, Any], key: SigningKey | None = None
) -> tuple[bytes, str]:
    """Returns a line with its line feed, and its digest."""
    fields = {"seq": seq, "previous": previous, "at_s": at_s, "kind": kind, "body": body}
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    digest = hashlib.sha256(text).hexdigest()
    signature = "" if key is None else f',"hmac":"{key.sign(digest)}"'
    return text[:-1] + f',"sha256":"{digest}"{signature}}}\n'.encode(), digest


def decode(line: bytes) -> AuditRecord:
    """Reads a line without its line feed."""
    start = max(0, len(line) - _END_BYTES)
    end = _END.search(line, start)
    text = b"" if end is None else line[: end.start()] + b"}"
    digest = hashlib.sha256(text).hexdigest()
    if end is None or end[1].decode() != digest:
        raise DamagedRecord("its bytes do not match its sha256")
    try:
        return AuditRecord(**json.loads(text), sha256=digest, hmac=(end[2] or b"").decode())
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedRecord(f"it is no record: {error}") from error


def split(content: bytes) -> tuple[Sequence[Line], int]:
    """Returns the complete lines of a file, and the number of bytes after the last line feed."""
    lines: list[Line] = []
    start = 0
    while (stop := content.find(b"\n", start)) >= 0:
        try:
            lines.append(Line(len(lines) + 1, stop + 1, decode(content[start:stop])))
        except DamagedRecord as error:
            lines.append(Line(len(lines) + 1, stop + 1, None, str(error)))
        start = stop + 1
    return lines, len(content) - start


@dataclass(frozen=True)
class AuditFinding:
    """A fault that the audit found in `file` of the run folder."""

    file: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


@dataclass(frozen=True)
class ChainFile:
    """The content of `audit.jsonl` and of `audit.head`, or the reason why the head cannot be used."""

    lines: Sequence[Line]
    num_torn_bytes: int
    head: Head | str

    @property
    def records(self) -> list[AuditRecord]:
        """The undamaged records, in the order of their numbers, each once."""
        by_number = {line.record.seq: line.record for line in self.lines if line.record}
        return [by_number[seq] for seq in sorted(by_number)]

    @property
    def has_torn_end(self) -> bool:
        """Whether the last bytes are a record that a killed process had not completed."""
        end = self.lines[-1].end if self.lines else 0
        return self.num_torn_bytes > 0 and isinstance(self.head, Head) and end >= self.head.num_bytes


def read_chain(folder: Path) -> ChainFile:
    path, end = folder / AUDIT_FILE, folder / HEAD_FILE
    try:
        # The end first: a run that goes on writes it after the record.
        head: Head | str = Head.decoded(end.read_bytes()) if end.is_file() else "it is missing"
    except (OSError, DamagedRecord) as error:
        head = f"it was altered: {error}"
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no file")
        lines, num_torn = split(path.read_bytes())
    except OSError as error:
        raise PreflightError(
            f"{path} cannot be read ({error.strerror}): give a run that has been written with metrics.audit=true"
        ) from error
    return ChainFile(lines, num_torn, head)


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
    """The chain that a writer continues. The first record of a part names the records that were lost before it."""

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
                os.pwrite(self._end, self.head.encoded(), 0)  # after the record: see the module's docstring
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
