"""Reads Hugging Face datasets: a folder of `save_to_disk`, a folder of data files, or a name on the hub."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from mobula.actors.datasets.readers.base import Opened, Record, Table, read_one_by_one
from mobula.cluster.errors import DatasetError
from mobula.configs.near_paths import may_be_hub_name, near

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
        raise DatasetError(
            f"data.path={opened.path}{near(opened.path)} has no split {opened.split} that datasets can load "
            f"({type(error).__name__}: "
            f"{reason}): name a folder or a hub dataset, and its splits in data.splits"
        ) from error
    root = opened.path if opened.path.is_dir() else Path()
    features = as_files(datasets, dataset.features)
    return HuggingFaceTable(dataset.with_format("arrow"), features, root, f"{opened.path}/{opened.split}")


def _refuse_unwritable(cache: Path) -> None:
    """Raises: DatasetError: the cache folder of `datasets` is not writable."""
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
    """Replaces images, sounds and videos in a feature by their encoded files, recursively.

    Decoding would need torchcodec, and encoding again would change the files.
    """
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

    @property
    def blocks(self) -> np.ndarray:
        return read_one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._dataset)

    def record(self, index: int) -> Record:
        with self._lock:
            [record] = self._dataset[index].to_pylist()
        return self._features.decode_example(record)

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"
