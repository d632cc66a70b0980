"""The hash chain of a run, `audit.jsonl`: one record a line, each with the sha256 of the record before it.

    {"seq":7,"previous":"9f...","at_s":1764244751.5,"kind":"trained","body":{...},"sha256":"4c..."}

`sha256` is the digest of the line without that field, byte for byte. `audit.head` beside it has the number of records,
their bytes and the newest digest; it is written after each record. So a last line that a killed writer left half
written stands behind the bytes that `audit.head` counts, and a removed or damaged record stands before them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

AUDIT_FILE = "audit.jsonl"  # in the run folder
HEAD_FILE = "audit.head"
GENESIS = "0" * 64  # the digest before the first record
_MARK = b',"sha256":"'
_END_BYTES = len(_MARK) + 64 + len('"}')
HEAD_BYTES = 192


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

    @property
    def name(self) -> str:
        """The record for a message: its number and kind, and its version if it has one."""
        version = f", version {self.body['version']}" if "version" in self.body else ""
        return f"record {self.seq} ({self.kind}{version})"


@dataclass(frozen=True)
class Head:
    """The end of the chain at one moment."""

    num_records: int = 0
    num_bytes: int = 0
    sha256: str = GENESIS

    def encoded(self) -> bytes:
        """Returns a text of `HEAD_BYTES` bytes."""
        return json.dumps(asdict(self)).ljust(HEAD_BYTES - 1).encode() + b"\n"

    @classmethod
    def decoded(cls, content: bytes) -> Self:
        """Raises: DamagedRecord: the content is not as `encoded` writes it."""
        try:
            head = cls(**json.loads(content))
        except (ValueError, TypeError) as error:
            raise DamagedRecord(f"it is no end of a chain: {content[:60]!r}") from error
        if head.encoded() != content:
            raise DamagedRecord("its bytes were changed")
        return head


@dataclass(frozen=True)
class Line:
    """One line of the file: a record, or the reason why it is none."""

    number: int  # from 1
    end: int  # position of the byte after it
    record: AuditRecord | None
    fault: str = ""


def encode(seq: int, previous: str, at_s: float, kind: str, body: Mapping[str, Any]) -> tuple[bytes, str]:
    """Returns a line with its line feed, and its digest."""
    fields = {"seq": seq, "previous": previous, "at_s": at_s, "kind": kind, "body": body}
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    digest = hashlib.sha256(text).hexdigest()
    return text[:-1] + _MARK + digest.encode() + b'"}\n', digest


def decode(line: bytes) -> AuditRecord:
    """Reads a line without its line feed.

    Raises:
        DamagedRecord: the line is not as `encode` wrote it.
    """
    text, mark = line[:-_END_BYTES] + b"}", line[-_END_BYTES : -_END_BYTES + len(_MARK)]
    digest = hashlib.sha256(text).hexdigest()
    if mark != _MARK or line[-_END_BYTES + len(_MARK) :] != f'{digest}"}}'.encode():
        raise DamagedRecord("its bytes do not match its sha256")
    try:
        return AuditRecord(**json.loads(text), sha256=digest)
    except (ValueError, TypeError) as error:
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
