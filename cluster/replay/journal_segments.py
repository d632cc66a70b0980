"""Segments: the files of a journal. Each is an Arrow IPC stream of records with checksums.

A record is one record batch with a kind, a small JSON body and a checksum in its metadata, so any Arrow reader can read
a segment. `read_segment` returns only the records before the first damaged byte.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa

from mobula.cluster.records.arrow import SCHEMA

_IDENTITY = b"identity"  # key in the schema's metadata: the run's identity, as JSON
_SUFFIX = ".arrows"
_BUFFER_BYTES = 2**18  # of unsynced data: Arrow writes a record in a hundred pieces
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # end of a closed segment


class RecordKind(StrEnum):
    """Kinds of records."""

    FINISHED = "finished"  # a group that will be trained; one row per trajectory
    REJECTED = "rejected"  # a group that will not be trained
    TRAINED = "trained"  # groups that make a version; rows hold the reference log-probs, if any
    EVALUATED = "evaluated"  # results and rewards of the held-out evaluation of a version
    RESUMED = "resumed"  # version and groups from which the run resumed: voids all else recorded before


@dataclass(frozen=True)
class JournalRecord:
    """One record of a journal."""

    kind: RecordKind
    body: Mapping[str, Any]
    rows: pa.RecordBatch


@dataclass(frozen=True)
class Segment:
    """The content of one file; the last `num_torn_bytes` bytes are damaged or incomplete."""

    number: int
    identity: Mapping[str, Any]
    records: tuple[JournalRecord, ...]
    num_torn_bytes: int


class SegmentWriter:
    """Appends records to one new file. `sync` returns once they are on disk."""

    def __init__(self, folder: Path, number: int, identity: Mapping[str, Any]) -> None:
        self.number = number
        self._file = segment_path(folder, number).open("xb")
        schema = SCHEMA.with_metadata({_IDENTITY: json.dumps(identity, sort_keys=True)})
        self._stream = pa.output_stream(self._file, buffer_size=_BUFFER_BYTES)
        self._writer = pa.ipc.new_stream(self._stream, schema)
        _sync_folder(folder)

    @property
    def num_bytes(self) -> int:
        return self._stream.tell()

    def write(self, record: JournalRecord) -> None:
        body = json.dumps(record.body)
        checksum = _checksum(record.kind.value, body, record.rows)
        metadata = {"kind": record.kind.value, "body": body, "checksum": str(checksum)}
        self._writer.write_batch(record.rows, custom_metadata=metadata)

    def sync(self) -> None:
        self._stream.flush()  # to the file, which has its own buffer
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._writer.close()
        self.sync()
        self._stream.close()

    def abandon(self) -> None:
        """Closes the file after a failed write. No record may follow an incomplete one."""
        with suppress(OSError):  # closing writes buffered bytes, which may fail again
            self._stream.close()


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}{_SUFFIX}"


def segment_numbers(folder: Path) -> list[int]:
    """Returns the numbers of the segments in `folder`, oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}"))


def read_segment(folder: Path, number: int) -> Segment:
    """Returns the intact records. Their rows are memory-mapped and read on access."""
    path = segment_path(folder, number)
    size = path.stat().st_size
    if size == 0:
        return Segment(number, {}, (), 0)
    with pa.memory_map(str(path)) as file:
        try:
            reader = pa.ipc.open_stream(file)
            if not reader.schema.equals(SCHEMA):
                raise ValueError("its columns are not those of this version")
            identity = json.loads(reader.schema.metadata[_IDENTITY])
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return Segment(number, {}, (), size)
        records, end = [], file.tell()
        for record in _records(reader):
            records.append(record)
            end = file.tell()
        file.seek(end)
        rest = file.read()
        return Segment(number, identity, tuple(records), 0 if rest == _END_OF_STREAM else len(rest))


def _records(reader: pa.RecordBatchStreamReader) -> Iterator[JournalRecord]:
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            record = _record(batch, metadata)
        except (StopIteration, pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return
        yield record


def _record(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> JournalRecord:
    """Raises: ValueError, KeyError, TypeError: the record is damaged."""
    batch.validate(full=True)
    kind, body = metadata[b"kind"].decode(), metadata[b"body"].decode()
    if int(metadata[b"checksum"]) != _checksum(kind, body, batch):
        raise ValueError("a record's checksum is wrong")
    return JournalRecord(RecordKind(kind), json.loads(body), batch)


def _checksum(kind: str, body: str, rows: pa.RecordBatch) -> int:
    return zlib.crc32(rows.serialize(), zlib.crc32(f"{kind}{body}".encode()))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
