"""Reads Parquet: files with the columns of a record, and the trajectories that a run has recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mobula.cluster.errors import PreflightError
from mobula.rewards.offline.sources.jsonl import Batch
from mobula.rewards.offline.sources.pictures import PROMPT_KEYS, RESPONSE_KEYS, VIDEO_KEYS
from mobula.rewards.offline.sources.records import (
    MAX_NAMED_LINES,
    BrokenRecordError,
    Record,
    from_values,
    parsed,
    with_everything,
)

BATCH_ROWS, BATCH_BYTES = 4096, 32 << 20  # of one batch, at most
BUFFER_BYTES = 1 << 20  # that is read of a column at a time
TRAJECTORIES_FOLDER = "trajectories"  # of a run folder
_PICTURES = (*PROMPT_KEYS, *VIDEO_KEYS, *RESPONSE_KEYS)
_COLUMNS = ("id", "prompt", "response", "reference", "metadata", *_PICTURES)
# of cluster.records.arrow.SCHEMA: column -> field of a record
_TRAJECTORY_COLUMNS = {
    "trajectory_id": "id",
    "prompt_text": "prompt",
    "response_text": "response",
    "references": "reference",
    "metadata": "metadata",
    "response_num_tokens": "generated_tokens",
    "response_is_truncated": "is_truncated",
    "media": "images",
}
_IN_METADATA = ("generated_tokens", "is_truncated")  # columns of their own that records keep with the rest


@dataclass(frozen=True)
class RowGroup:
    """One row group of a Parquet file; `columns` names what becomes which field of a record."""

    path: Path
    index: int
    size: int  # rows
    columns: Mapping[str, str]

    def __str__(self) -> str:
        return f"row group {self.index} of {self.path}"

    def batches(self, *, with_metadata: bool) -> Iterator[Batch]:
        """Batches of at most `BATCH_ROWS` rows and about `BATCH_BYTES`, so that a file of one row group need not fit
        into memory, however large its pictures are.
        """
        read = [column for column, field in self.columns.items() if with_metadata or field not in _PICTURES]
        with pq.ParquetFile(self.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            for batch in file.iter_batches(self._num_rows(file, read), [self.index], columns=read):
                yield _read(batch.rename_columns([self.columns[n] for n in batch.schema.names]), with_metadata)

    def _num_rows(self, file: pq.ParquetFile, read: Sequence[str]) -> int:
        """How many rows of these columns make a batch."""
        group = file.metadata.row_group(self.index)
        chunks = map(group.column, range(group.num_columns))
        num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in read)
        return max(1, min(BATCH_ROWS, BATCH_BYTES * self.size // max(1, num_bytes)))


def parts_of(path: Path) -> tuple[str, str, Sequence[RowGroup]]:
    """The kind of a folder or Parquet file, the unit of its parts' sizes, and the parts.

    Raises:
        PreflightError: the folder holds no recorded trajectories, or a file is no Parquet or has no responses.
    """
    if not path.is_dir():
        return "parquet", "rows", _row_groups(path)
    folder = path / TRAJECTORIES_FOLDER if (path / TRAJECTORIES_FOLDER).is_dir() else path
    files = sorted(folder.glob("step-*.parquet"))
    if not files:
        raise PreflightError(f"{path} holds no recorded trajectories: give a run that had replay.trajectory_log=true")
    return "trajectories", "rows", [group for file in files for group in _row_groups(file)]


def _row_groups(path: Path) -> list[RowGroup]:
    try:
        with pq.ParquetFile(path) as file:
            names = set(file.schema_arrow.names)
            rows = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    except pa.ArrowInvalid as error:
        raise PreflightError(f"{path} is no Parquet file ({error}): write it again") from error
    columns = _TRAJECTORY_COLUMNS if "response_text" in names else {name: name for name in _COLUMNS if name in names}
    if not {"response", "response_text"} & names:
        raise PreflightError(f"{path} has no column `response`, only {', '.join(sorted(names))}: name one so")
    return [RowGroup(path, index, num, columns) for index, num in enumerate(rows)]


def _read(batch: pa.RecordBatch, with_metadata: bool) -> Batch:
    records: list[Record] = []
    broken: list[tuple[int, str]] = []
    num_broken = 0
    for number, row in enumerate(batch.to_pylist(), 1):
        try:
            records.append(_record(row, with_metadata))
        except BrokenRecordError as error:
            num_broken += 1
            if len(broken) < MAX_NAMED_LINES:
                broken.append((number, str(error)))
    return Batch(records, batch.num_rows, num_broken, broken)


def _record(row: dict[str, Any], with_metadata: bool) -> Record:
    stated = {name: row.pop(name) for name in _IN_METADATA if name in row}
    if stated:
        metadata = parsed(row.get("metadata") or "{}")
        row["metadata"] = {**stated, **metadata} if isinstance(metadata, Mapping) else metadata
    return with_everything(from_values(row), row) if with_metadata else from_values(row)
