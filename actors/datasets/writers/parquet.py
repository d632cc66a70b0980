"""Parquet files with media in them, in row groups that a reader holds in memory without effort."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mobula.actors.datasets.writers.base import AudioFile, MediaFile, PictureFile, VideoFile

GROUP_RECORDS = 1000
GROUP_BYTES = 16 << 20  # of media


class ParquetWriter:
    """One file. All records must fit into one schema, which is known at the end: until then they are in parts."""

    def __init__(self, folder: Path, split: str) -> None:
        self._path = folder / f"{split}.parquet"
        self._parts = folder / f".{split}.arrow"
        self._sink = pa.OSFile(str(self._parts), "wb")
        self._records: list[dict[str, Any]] = []
        self._num_bytes = 0
        self._schemas: list[pa.Schema] = []
        self._sizes: list[tuple[int, int]] = []  # offset and bytes of each part

    def images(self, files: list[PictureFile]) -> list[dict[str, Any]]:
        return self._held(files)

    def videos(self, files: list[VideoFile]) -> list[dict[str, Any]]:
        return self._held(files)

    def audios(self, files: list[AudioFile]) -> list[dict[str, Any]]:
        return self._held(files)

    def write(self, record: dict[str, Any]) -> None:
        """Raises: ValueError: the values of a column are of types that do not fit together."""
        self._records.append(record)
        if len(self._records) >= GROUP_RECORDS or self._num_bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Raises: ValueError: as `write`."""
        self._flush()
        self._sink.close()
        if not self._schemas:
            self._parts.unlink()
            return
        try:
            schema = pa.unify_schemas(self._schemas, promote_options="permissive")
            with pa.memory_map(str(self._parts)) as parts, pq.ParquetWriter(self._path, schema) as writer:
                for offset, size in self._sizes:
                    parts.seek(offset)
                    table = pa.ipc.open_stream(parts.read_buffer(size)).read_all()
                    writer.write_table(pa.Table.from_pylist(table.to_pylist(), schema=schema))
        except pa.ArrowException as error:
            raise ValueError(f"the columns do not fit into one schema ({error}): write jsonl") from error
        finally:
            self._parts.unlink()

    def _held(self, files: Sequence[MediaFile]) -> list[dict[str, Any]]:
        self._num_bytes += sum(len(file.content) for file in files)
        return [{"bytes": file.content, "path": file.name} for file in files]

    def _flush(self) -> None:
        if not self._records:
            return
        columns = dict.fromkeys(column for record in self._records for column in record)
        try:
            table = pa.Table.from_pylist(
                [{column: record.get(column) for column in columns} for record in self._records]
            )
        except pa.ArrowException as error:
            raise ValueError(f"the columns do not fit into one schema ({error}): write jsonl") from error
        start = self._sink.tell()
        with pa.ipc.new_stream(self._sink, table.schema) as stream:
            stream.write_table(table)
        self._sizes.append((start, self._sink.tell() - start))
        self._schemas.append(table.schema)
        self._records, self._num_bytes = [], 0
