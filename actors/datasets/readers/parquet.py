"""Reads Parquet and Arrow files lazily."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobula.actors.datasets.readers.base import SUFFIXES, BlockCache, Opened, Record, Table, files_of
from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import DatasetError
from mobula.cluster.files import replacing

WHOLE_BYTES = 1 << 20  # files up to this size are hashed completely


NUM_BLOCKS, BLOCK_BYTES = 16, 1 << 16  # of larger files: equidistant blocks, with the first and the last bytes


def fingerprint_of(files: Iterable[Path]) -> str:
    """A hash of names, sizes and content; reads at most 1 MiB of each file. Media files are not included."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            if size <= WHOLE_BYTES:
                digest.update(content.read())
                continue
            for block in range(NUM_BLOCKS):
                content.seek((size - BLOCK_BYTES) * block // (NUM_BLOCKS - 1))
                digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


NARROW = {pa.float16(): np.float16, pa.float32(): np.float32}


def records_of(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Raises: RowError: a map has a key twice."""
    try:
        records = table.to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        raise RowError("repeated_key", f"a map of the record has a key twice ({error}): write it once") from error
    return [_spelled(record, pa.struct(table.schema)) for record in records]


def refuse_repeated(schema: pa.Schema, name: str) -> None:
    """Raises: DatasetError: two columns have one name."""
    repeated = [column for column in schema.names if schema.names.count(column) > 1]
    if repeated:
        raise DatasetError(f"{name} has two columns {repeated[0]}: rename one of them")


def _spelled(value: Any, kind: pa.DataType) -> Any:
    """Converts float32 0.1 to 0.1 in columns and struct fields, but not in arrays (such as samples of a sound)."""
    if value is None:
        return None
    if kind in NARROW:
        return float(str(NARROW[kind](value)))
    if pa.types.is_struct(kind):
        return {field.name: _spelled(value[field.name], field.type) for field in kind}
    return value


BATCH_RECORDS = 256  # largest batch, which is decoded to read a record


class ArrowFile:
    """A memory-mapped Arrow IPC file with random access to records."""

    def __init__(self, path: Path) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = range(self._reader.num_record_batches)
        self._ends = np.cumsum([self._reader.get_batch(batch).num_rows for batch in batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def record(self, index: int) -> dict[str, Any]:
        batch = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[batch - 1]) if batch else 0
        return records_of(self._reader.get_batch(batch).slice(index - start, 1))[0]


def cached(folder: Path, key: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> ArrowFile:
    """Opens the file of `key` in `folder`; writes `batches` to it atomically if it does not exist."""
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.arrow"
    if not path.is_file():
        with replacing(path) as draft, pa.ipc.new_file(draft, schema) as writer:
            for batch in batches:
                for start in range(0, batch.num_rows, BATCH_RECORDS):
                    writer.write_batch(batch.slice(start, BATCH_RECORDS))
    return ArrowFile(path)


def file_key(file: Path) -> str:
    """A key of a file's content: path, size and modification time."""
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


COPIED_RECORDS = 1024  # records of a large row group that are decoded at once


def open_parquet(opened: Opened) -> Table:
    """Raises: DatasetError: a file is no Parquet file, or has two columns with the same name."""
    try:
        return ParquetTable(opened, files_of(opened, SUFFIXES["parquet"]))
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"the Parquet files of {opened.path} cannot be read ({error}): write them again") from error


class ParquetTable:
    """Implements `Table`. A block is a row group; records of a copied file are read one by one."""

    def __init__(self, opened: Opened, files: list[Path]) -> None:
        self.root = opened.path
        self.source = str(files[0])
        self._files = [pq.ParquetFile(file, memory_map=True) for file in files]
        for path, file in zip(files, self._files, strict=True):
            refuse_repeated(file.schema_arrow, str(path))
        self._names = [file.name for file in files]
        self._copies: dict[int, ArrowFile] = {}
        groups: list[tuple[int, int, int, int]] = []  # file, row group, first record in the file, records
        sizes: list[int] = []
        for number, (path, file) in enumerate(zip(files, self._files, strict=True)):
            infos = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
            if any(info.total_byte_size > opened.max_block_bytes for info in infos):
                self._copies[number] = _copied(path, file, opened.cache)
                groups.append((number, 0, 0, file.metadata.num_rows))
                sizes.append(0)
                continue
            start = 0
            for group, info in enumerate(infos):
                groups.append((number, group, start, info.num_rows))
                sizes.append(info.total_byte_size)
                start += info.num_rows
        self._groups = groups
        self._ends = np.cumsum([rows for *_, rows in groups], dtype=np.int64)
        self.blocks = np.array([(g[3], size) for g, size in zip(groups, sizes, strict=True)], dtype=np.int64)
        self._lock = threading.Lock()
        self._loaded: BlockCache[pa.Table] = BlockCache(self._load, opened.max_block_bytes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def record(self, index: int) -> Record:
        block, row = self._locate(index)
        file, _, first, _ = self._groups[block]
        try:
            if file in self._copies:
                record = self._copies[file].record(first + row)
            else:
                with self._lock:
                    table = self._loaded.get(block)
                record = records_of(table.slice(row, 1))[0]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RowError("broken_parquet", f"the record cannot be read ({error}): write the file again") from error
        return record

    def name(self, index: int) -> str:
        block, row = self._locate(index)
        file, _, first, _ = self._groups[block]
        return f"{self._names[file]}:{first + row + 1}"

    def _locate(self, index: int) -> tuple[int, int]:
        block = int(np.searchsorted(self._ends, index, side="right"))
        return block, index - (int(self._ends[block - 1]) if block else 0)

    def _load(self, block: int) -> tuple[pa.Table, int]:
        """Reads a row group; returns it with the size in `blocks`, not the size in memory (which differs for dictionary
        columns), so that all blocks of a shuffle window fit into the cache.
        """
        file, group, _, _ = self._groups[block]
        return self._files[file].read_row_group(group, use_threads=False), int(self.blocks[block, 1])


def _copied(path: Path, file: pq.ParquetFile, cache: Path) -> ArrowFile:
    streamed = pq.ParquetFile(path, memory_map=True, buffer_size=1 << 20)
    return cached(
        cache, file_key(path), file.schema_arrow, streamed.iter_batches(batch_size=COPIED_RECORDS, use_threads=False)
    )
