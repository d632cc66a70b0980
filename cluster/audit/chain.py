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
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, Self

from mobula.cluster.errors import PreflightError

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


def check_order(chain: ChainFile) -> Iterator[AuditFinding]:
    """Yields every record that was altered, removed, added, replaced or moved; empty for a chain as it was written."""
    intact = [(line.number, line.record) for line in chain.lines if line.record]
    present = Counter(record.seq for _, record in intact)
    num_counted = chain.head.num_records if isinstance(chain.head, Head) else 0
    end = max([num_counted, *(seq + 1 for seq in present)])
    damaged = _damaged(chain.lines, _gaps(present, end))
    for line, seq in damaged:
        yield AuditFinding(AUDIT_FILE, f"record {seq} (line {line.number}) was altered: {line.fault}")
    absent = _gaps({*present, *(seq for _, seq in damaged)}, end)
    if chain.num_torn_bytes and not chain.has_torn_end:
        number = absent[-1][-1] if absent else len(chain.lines)
        absent = _gaps({*present, *(seq for _, seq in damaged), number}, end)
        yield AuditFinding(
            AUDIT_FILE, f"record {number} was altered: its line has no end ({chain.num_torn_bytes} bytes)"
        )
    for gap in absent:
        are = f"record {gap[0]} is" if gap[0] == gap[-1] else f"records {gap[0]} to {gap[-1]} are"
        yield AuditFinding(AUDIT_FILE, f"{are} missing")
    for seq, num in present.items():
        if num > 1:
            yield AuditFinding(AUDIT_FILE, f"record {seq} stands {num} times in the file")
    for (_, before), (number, record) in pairwise(intact):
        if record.seq < before.seq:
            yield AuditFinding(
                AUDIT_FILE, f"{record.name} stands after {before.name} (line {number}): records were moved"
            )
    yield from _check_links({record.seq: record for _, record in intact})
    yield from _check_head(chain, intact)


def _damaged(lines: Sequence[Line], gaps: Sequence[range]) -> list[tuple[Line, int]]:
    """Returns the damaged lines with the number of the record that each was, by its place."""
    found: list[tuple[Line, int]] = []
    expected = 0
    for line in lines:
        if line.record is not None:
            expected = line.record.seq + 1
            continue
        found.append((line, next((max(gap.start, expected) for gap in gaps if gap.stop > expected), expected)))
        expected = found[-1][1] + 1
    return found


def _gaps(numbers: Iterable[int], end: int) -> list[range]:
    """Returns the ranges below `end` without a number: a foreign chain may count to any number."""
    edges = [-1, *sorted(numbers), end]
    return [range(low + 1, high) for low, high in pairwise(edges) if low + 1 < high]


def _check_links(by_number: dict[int, AuditRecord]) -> Iterator[AuditFinding]:
    for seq, record in by_number.items():
        before = GENESIS if seq == 0 else by_number[seq - 1].sha256 if seq - 1 in by_number else record.previous
        if record.previous != before:
            yield AuditFinding(
                AUDIT_FILE,
                f"{record.name} was written after another record {seq - 1} than the one in the file: one of them was "
                "replaced",
            )


def _check_head(chain: ChainFile, intact: Sequence[tuple[int, AuditRecord]]) -> Iterator[AuditFinding]:
    if not isinstance(chain.head, Head):
        yield AuditFinding(HEAD_FILE, chain.head)
        return
    last = next((record for _, record in intact if record.seq == chain.head.num_records - 1), None)
    if last is not None and last.sha256 != chain.head.sha256:
        yield AuditFinding(HEAD_FILE, f"{last.name} has another sha256 than the one noted here: it was replaced")
    if chain.head.num_records == 0 and chain.head.sha256 != GENESIS:
        yield AuditFinding(HEAD_FILE, "it has a digest and counts no record")
    is_last_line = last is not None and chain.lines and chain.lines[-1].record in (last, None)
    if is_last_line and last is not None and len(chain.lines) == chain.head.num_records:
        end = chain.lines[-1].end
        if end != chain.head.num_bytes:
            yield AuditFinding(HEAD_FILE, f"it counts {chain.head.num_bytes} bytes, and the file has {end}")
    beyond = [record for _, record in intact if record.seq > chain.head.num_records]  # one may follow: a killed writer
    if beyond:
        yield AuditFinding(
            HEAD_FILE, f"it counts {chain.head.num_records} records, and {beyond[0].name} is beyond them"
        )


def check_signatures(chain: ChainFile, key: SigningKey | None) -> Iterator[AuditFinding]:
    """Yields records and head that the holder of the key did not write."""
    records = chain.records
    signed = [record for record in records if record.hmac]
    if key is None:
        if signed:
            yield AuditFinding(
                AUDIT_FILE, "its records are signed, and no key was given: name its variable by --key-env"
            )
        return
    wrong = [record for record in signed if not key.signed(record.sha256, record.hmac)]
    for records_of, fault in (
        ([record for record in records if not record.hmac], "are not signed"),
        (wrong, "were signed with another key"),
    ):
        if records_of:
            first = f"the first is {records_of[0].name}"
            yield AuditFinding(AUDIT_FILE, f"{len(records_of)} of {len(records)} records {fault}: {first}")
    if isinstance(chain.head, Head) and not key.signed(chain.head.text, chain.head.hmac):
        yield AuditFinding(HEAD_FILE, "it was not signed with this key: records after its end may have been removed")


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
