"""Memory-mapped Arrow files in the cache: copies of files without random access to records."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa

from mobula.actors.datasets.readers.arrow_records import records_of

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
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=f".{path.name}.", delete=False) as draft:
            try:
                with pa.ipc.new_file(draft, schema) as writer:
                    for batch in batches:
                        for start in range(0, batch.num_rows, BATCH_RECORDS):
                            writer.write_batch(batch.slice(start, BATCH_RECORDS))
                draft.flush()
                os.replace(draft.name, path)
            except BaseException:
                os.unlink(draft.name)
                raise
    return ArrowFile(path)


def file_key(file: Path) -> str:
    """A key of a file's content: path, size and modification time."""
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
