"""Reads Parquet files by row group. Files with large row groups are copied once to an Arrow file in the cache."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobula.actors.datasets.readers.arrow_file import ArrowFile, cached, file_key
from mobula.actors.datasets.readers.arrow_records import records_of, refuse_repeated
from mobula.actors.datasets.readers.base import SUFFIXES, BlockCache, Opened, Record, Table, files_of
from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import DatasetError

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
