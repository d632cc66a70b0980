"""Parquet files: read by row group; a file with larger ones is copied to an Arrow file in the cache once."""

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

COPIED_RECORDS = 1024  # of a large row group that are decoded at a time


def open_parquet(opened: Opened) -> Table:
    """Raises: DatasetError: a file is no Parquet file, or has two columns of one name."""
    try:
        return ParquetTable(opened, files_of(opened, SUFFIXES["parquet"]))
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"the Parquet files of {opened.path} cannot be read ({error}): write them again") from error


class ParquetTable:
    """The records of Parquet files. A block is a row group; records of a copied file are read one by one."""

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
            found = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
            if any(group.total_byte_size > opened.max_block_bytes for group in found):
                self._copies[number] = _copied(path, file, opened.cache)
                groups.append((number, 0, 0, file.metadata.num_rows))
                sizes.append(0)
                continue
            start = 0
            for group, info in enumerate(found):
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

    def record(self, place: int) -> Record:
        block, row = self._find(place)
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

    def name(self, place: int) -> str:
        block, row = self._find(place)
        file, _, first, _ = self._groups[block]
        return f"{self._names[file]}:{first + row + 1}"

    def _find(self, place: int) -> tuple[int, int]:
        block = int(np.searchsorted(self._ends, place, side="right"))
        return block, place - (int(self._ends[block - 1]) if block else 0)

    def _load(self, block: int) -> tuple[pa.Table, int]:
        """A row group, and its size as `blocks` has it: the blocks that are shuffled together stay in memory together,
        even where a dictionary made them smaller in the file."""
        file, group, _, _ = self._groups[block]
        return self._files[file].read_row_group(group, use_threads=False), int(self.blocks[block, 1])


def _copied(path: Path, file: pq.ParquetFile, cache: Path) -> ArrowFile:
    streamed = pq.ParquetFile(path, memory_map=True, buffer_size=1 << 20)
    return cached(
        cache, file_key(path), file.schema_arrow, streamed.iter_batches(batch_size=COPIED_RECORDS, use_threads=False)
    )
