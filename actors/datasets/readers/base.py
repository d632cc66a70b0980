"""Table: random access to the records of a split, read one by one or block by block."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mobula.cluster.errors import DatasetError
from mobula.configs.near_paths import near

Record = Mapping[str, Any]
T = TypeVar("T")
SUFFIXES = {  # kind of data -> suffixes of files, by priority
    "jsonl": (".jsonl",),
    "prompts": (".jsonl", ".txt"),
    "json": (".json", ".jsonl"),
    "parquet": (".parquet",),
    "webdataset": (".tar",),
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
TABLES = (".csv", ".tsv")


class Table(Protocol):
    """Records in the order of the files. Thread-safe."""

    @property
    def blocks(self) -> np.ndarray:
        """int64 [num_blocks, 2]: number of records of each block, and bytes in memory while a record of it is read; 0
        bytes if records are read one by one."""

    @property
    def root(self) -> Path:
        """The folder that paths of media are relative to."""

    @property
    def source(self) -> str:
        """The first file, or the name of the dataset, for error messages."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record:
        """Raises: RowError: the record cannot be read."""

    def name(self, index: int) -> str:
        """The file and the number in the file, e.g. `train.jsonl:12`."""


@dataclass(frozen=True)
class Opened:
    """Input of a reader: the location of the data, and its options."""

    path: Path  # a folder, or a hub name
    split: str  # name in the data
    cache: Path  # folder of files for later runs
    max_block_bytes: int  # larger blocks are not read into memory
    subset: str  # configuration of a dataset with several; else empty
    num_streamed: int  # records to stream from the hub; 0 downloads all


Reader = Callable[[Opened], Table]
"""Raises: DatasetError: there is no such split, or the files cannot be read."""


def files_of(opened: Opened, suffixes: Sequence[str]) -> list[Path]:
    """The files of a split, sorted by name: `SPLIT.EXT`, `SPLIT-*.EXT` or `SPLIT/*.EXT` in the folder or in `data/`. A
    split name with a wildcard or a dot is a pattern of file names. Raises: DatasetError: there are none."""
    folder, split = opened.path, opened.split
    if folder.is_file():
        raise DatasetError(
            f"data.path={folder} is a file: name its folder, and its files as data.splits={{{split}: {folder.name}}}"
        )
    is_pattern = any(character in split for character in "*?[.")
    for suffix in suffixes:
        names = [split] if is_pattern else [f"{split}{suffix}", f"{split}-*{suffix}", f"{split}/*{suffix}"]
        for below in (folder, folder / "data"):
            for name in names:
                if files := sorted(path for path in below.glob(name) if path.is_file()):
                    return files
    wanted = split if is_pattern else f"{split}{suffixes[0]}"
    refuse_unread(folder, split)
    raise DatasetError(
        f"{folder / wanted} does not exist: set data.path to a folder that holds {wanted}, or name the files of the "
        f"split in data.splits{near(folder / wanted)}"
    )


def refuse_unread(folder: Path, split: str) -> None:
    """Raises: DatasetError: the split exists in an unsupported file format."""
    for path in sorted((*folder.glob(f"{split}*"), *(folder / "data").glob(f"{split}*"))):
        if path.suffix in COMPRESSED:
            raise DatasetError(f"{path} is compressed: unpack it")
        if path.suffix in TABLES:
            raise DatasetError(f"{path} has no types: set data.kind=huggingface, or convert it to Parquet")


def without_nulls(value: Any) -> Any:
    """Removes missing fields recursively: columnar files have every field in every record. Null, NaN, and the missing
    values of NumPy and pandas are removed; an item of a list becomes None."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if not is_missing(item)}
    if isinstance(value, list | tuple):
        return [None if is_missing(item) else without_nulls(item) for item in value]
    return value


def is_missing(value: Any) -> bool:
    """Whether a value is null or NaN of any library: None, NaN, NaT or NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, float | np.floating | np.datetime64 | np.timedelta64) and bool(value != value)


def read_one_by_one(num_records: int) -> np.ndarray:
    """The `blocks` of a table with records that are read one by one."""
    return np.array([[num_records, 0]], dtype=np.int64)


def located(ends: np.ndarray, index: int) -> tuple[int, int]:
    """The part with a record, and the record's index in it. `ends`, int64 [N]: records up to the end of each part."""
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


class OpenFiles:
    """Files that are read at any offset, and closed with this object. Thread-safe."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._descriptors: list[int] = []
        for file in files:
            self._descriptors.append(os.open(file, os.O_RDONLY))

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def read(self, file: int, start: int, length: int) -> bytes:
        return os.pread(self._descriptors[file], length, start)


class BlockCache(Generic[T]):
    """An LRU cache of blocks with at most `max_bytes`, but at least one block. Not thread-safe."""

    def __init__(self, load: Callable[[int], tuple[T, int]], max_bytes: int) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, block: int) -> T:
        if block not in self._blocks:
            self._blocks[block] = self._load(block)
            self._num_bytes += self._blocks[block][1]
            while self._num_bytes > self._max_bytes and len(self._blocks) > 1:
                _, (_, freed) = self._blocks.popitem(last=False)
                self._num_bytes -= freed
        self._blocks.move_to_end(block)
        return self._blocks[block][0]
