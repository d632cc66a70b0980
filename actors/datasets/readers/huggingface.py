"""Hugging Face datasets: a folder of `save_to_disk`, a local folder of data files, or a name on the hub."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from actors.datasets.readers.base import Opened, Record, Table, read_one_by_one, without_nulls
from cluster.errors import DatasetError

STREAMED_RECORDS = 256  # of a stream that are in memory at a time


def open_huggingface(opened: Opened) -> Table:
    """Raises: DatasetError: the package is missing, or the dataset or its split cannot be had."""
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"data.kind=huggingface needs the package datasets ({error}): install mobula[data]"
        ) from error
    try:
        found = _opened(datasets, opened)
    except Exception as error:  # of any kind, by which of its loaders fails
        reason = " ".join(str(error).split())
        raise DatasetError(
            f"data.path={opened.path} has no split {opened.split} that datasets can load ({type(error).__name__}: "
            f"{reason}): name a folder or a hub dataset, and its splits in data.splits"
        ) from error
    root = opened.path if opened.path.is_dir() else Path()
    return HuggingFaceTable(found, root, f"{opened.path}/{opened.split}")


def _opened(datasets: Any, opened: Opened) -> Any:
    """The dataset, memory-mapped. A stream is cut after `num_streamed` records, which are kept in the cache."""
    if (opened.path / "dataset_dict.json").is_file() or (opened.path / "state.json").is_file():
        found = datasets.load_from_disk(str(opened.path))
        return _raw(datasets, found[opened.split] if isinstance(found, datasets.DatasetDict) else found)
    if opened.num_streamed == 0:
        return _raw(datasets, datasets.load_dataset(str(opened.path), split=opened.split))
    kept = opened.cache / f"stream-{str(opened.path).replace('/', '_')}-{opened.split}-{opened.num_streamed}"
    if not kept.is_dir():
        stream = _raw(datasets, datasets.load_dataset(str(opened.path), split=opened.split, streaming=True))
        written = datasets.Dataset.from_generator(
            lambda: islice(stream, opened.num_streamed),
            features=stream.features,
            cache_dir=str(opened.cache / "generated"),
            writer_batch_size=STREAMED_RECORDS,
        )
        draft = kept.with_name(f".{kept.name}")
        written.save_to_disk(str(draft))
        draft.rename(kept)
    return _raw(datasets, datasets.load_from_disk(str(kept)))


def _raw(datasets: Any, found: Any) -> Any:
    """Pictures as their files: decoded ones would be encoded again, and lose what they were."""
    for column, feature in (found.features or {}).items():
        if isinstance(feature, datasets.Image):
            found = found.cast_column(column, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            found = found.cast_column(column, type(feature)(datasets.Image(decode=False)))
    return found


class HuggingFaceTable:
    """The records of a memory-mapped dataset."""

    def __init__(self, dataset: Any, root: Path, name: str) -> None:
        self.root = root
        self.source = name
        self._dataset = dataset
        self._name = name
        self._lock = threading.Lock()

    @property
    def blocks(self) -> np.ndarray:
        return read_one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._dataset)

    def record(self, place: int) -> Record:
        with self._lock:
            record = self._dataset[place]
        return without_nulls(record)

    def name(self, place: int) -> str:
        return f"{self._name}:{place + 1}"
