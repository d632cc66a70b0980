"""Reads Arrow data lazily: Parquet files, and Hugging Face datasets."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobula.actors.datasets.readers.files import (
    SUFFIXES,
    BlockCache,
    Opened,
    Record,
    Table,
    files_of,
    located,
    read_one_by_one,
)
from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import DatasetError, SplitNotFoundError
from mobula.cluster.files import replacing
from mobula.configs.near_paths import may_be_hub_name, near

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

    def record(self, index: int) -> dict[str, Any]:
        batch, row = located(self._ends, index)
        return records_of(self._reader.get_batch(batch).slice(row, 1))[0]


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
            columns = file.schema_arrow.names
            if repeated := [column for column in columns if columns.count(column) > 1]:
                raise DatasetError(f"{path} has two columns {repeated[0]}: rename one of them")
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
        block, row = located(self._ends, index)
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
        block, row = located(self._ends, index)
        file, _, first, _ = self._groups[block]
        return f"{self._names[file]}:{first + row + 1}"

    def _load(self, block: int) -> tuple[pa.Table, int]:
        """Reads a row group; returns it with the size in `blocks`, not the size in memory (which differs for dictionary
        columns), so that all blocks of a shuffle window fit into the cache."""
        file, group, _, _ = self._groups[block]
        return self._files[file].read_row_group(group, use_threads=False), int(self.blocks[block, 1])


def _copied(path: Path, file: pq.ParquetFile, cache: Path) -> ArrowFile:
    """Opens an Arrow copy of a file in `cache`, named by path, size and modification time; writes it atomically if it
    does not exist."""
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    copy = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.arrow"
    if not copy.is_file():
        streamed = pq.ParquetFile(path, memory_map=True, buffer_size=1 << 20)
        with replacing(copy) as draft, pa.ipc.new_file(draft, file.schema_arrow) as writer:
            for batch in streamed.iter_batches(batch_size=COPIED_RECORDS, use_threads=False):
                for start in range(0, batch.num_rows, BATCH_RECORDS):
                    writer.write_batch(batch.slice(start, BATCH_RECORDS))
    return ArrowFile(copy)


STREAMED_RECORDS = 256  # records of a stream in memory


def open_huggingface(opened: Opened) -> Table:
    """Raises: DatasetError: the package is missing, the cache is not writable, or the split cannot be loaded."""
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"data.kind=huggingface needs the package datasets ({error}): install mobula[data]"
        ) from error
    if not opened.path.exists() and not may_be_hub_name(str(opened.path)):
        raise DatasetError(
            f"data.path={opened.path}: no such folder{near(opened.path)}, and it is no hub name, which looks like "
            f"openai/gsm8k: set data.path to one of the two"
        )
    try:
        dataset = _opened(datasets, opened)
    except Exception as error:  # the type depends on the loader that fails
        _refuse_unwritable(Path(datasets.config.HF_DATASETS_CACHE))
        reason = " ".join(str(error).split())
        is_absent = "nknown split" in reason or isinstance(error, KeyError)
        raise (SplitNotFoundError if is_absent else DatasetError)(
            f"data.path={opened.path}{near(opened.path)} has no split {opened.split} that datasets can load "
            f"({type(error).__name__}: "
            f"{reason}): name a folder or a hub dataset, and its splits in data.splits"
        ) from error
    root = opened.path if opened.path.is_dir() else Path()
    features = as_files(datasets, dataset.features)
    return HuggingFaceTable(dataset.with_format("arrow"), features, root, f"{opened.path}/{opened.split}")


def _refuse_unwritable(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise DatasetError(
            f"the cache of datasets, {cache}, cannot be written ({error.strerror}): set HF_HOME to a folder that can"
        ) from error


def _opened(datasets: Any, opened: Opened) -> Any:
    """Opens the dataset, memory-mapped. The first `num_streamed` records of a stream are stored in the cache."""
    if (opened.path / "dataset_dict.json").is_file() or (opened.path / "state.json").is_file():
        if opened.subset:
            raise ValueError(f"a folder of save_to_disk has no data.huggingface.subset, which is {opened.subset}")
        if opened.num_streamed:
            raise ValueError(
                f"a folder of save_to_disk is not streamed, and data.huggingface.streamed_rows={opened.num_streamed}"
            )
        loaded = datasets.load_from_disk(str(opened.path))
        return loaded[opened.split] if isinstance(loaded, datasets.DatasetDict) else loaded
    source, subset = str(opened.path), opened.subset or None
    if opened.num_streamed == 0:
        loaded = datasets.load_dataset(source, subset, split=opened.split)
        if loaded.info.builder_name != "csv":
            return loaded
        # CSV files have no types: an answer of 007 must not become 7.
        texts = datasets.Features({name: datasets.Value("string") for name in loaded.info.features})
        return datasets.load_dataset(source, subset, split=opened.split, features=texts)
    name = "-".join(part.replace("/", "_") for part in (source, opened.subset, opened.split) if part)
    cached = opened.cache / f"stream-{name}-{opened.num_streamed}"
    if not cached.is_dir():
        stream = datasets.load_dataset(source, subset, split=opened.split, streaming=True).decode(False)
        written = datasets.Dataset.from_generator(
            lambda: islice(stream, opened.num_streamed),
            features=stream.features and as_files(datasets, stream.features),
            cache_dir=str(opened.cache / "generated"),
            writer_batch_size=STREAMED_RECORDS,
        )
        draft = cached.with_name(f".{cached.name}")
        written.save_to_disk(str(draft))
        draft.rename(cached)
    return datasets.load_from_disk(str(cached))


def as_files(datasets: Any, feature: Any) -> Any:
    """Replaces images, sounds and videos in a feature by their encoded files, recursively. Decoding would need
    torchcodec, and encoding again would change the files."""
    if isinstance(feature, dict):
        return type(feature)({key: as_files(datasets, value) for key, value in feature.items()})
    if isinstance(feature, list | tuple):
        return [as_files(datasets, feature[0])]
    if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
        return {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    if hasattr(feature, "feature"):
        length = {"length": feature.length} if hasattr(feature, "length") else {}
        return type(feature)(as_files(datasets, feature.feature), **length)
    return feature


class HuggingFaceTable:
    """Implements `Table` for a memory-mapped dataset in the format arrow; `features` decode a record."""

    def __init__(self, dataset: Any, features: Any, root: Path, name: str) -> None:
        self.root = root
        self.source = name
        self._dataset = dataset
        self._features = features
        self._name = name
        self._lock = threading.Lock()
        self.blocks = read_one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._dataset)

    def record(self, index: int) -> Record:
        with self._lock:
            [record] = self._dataset[index].to_pylist()
        return self._features.decode_example(record)

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"
