"""Hugging Face datasets: a folder of `save_to_disk`, a local folder of data files, or a name on the hub."""

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

STREAMED_RECORDS = 256  # of a stream that are in memory at a time


def open_huggingface(opened: Opened) -> Table:
    """Raises: DatasetError: the package is missing or cannot write, or the dataset or its split cannot be had."""
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
        found = _opened(datasets, opened)
    except Exception as error:  # of any kind, by which of its loaders fails
        _refuse_unwritable(Path(datasets.config.HF_DATASETS_CACHE))
        reason = " ".join(str(error).split())
        raise DatasetError(
            f"data.path={opened.path}{near(opened.path)} has no split {opened.split} that datasets can load "
            f"({type(error).__name__}: "
            f"{reason}): name a folder or a hub dataset, and its splits in data.splits"
        ) from error
    root = opened.path if opened.path.is_dir() else Path()
    features = as_files(datasets, found.features)
    return HuggingFaceTable(found.with_format("arrow"), features, root, f"{opened.path}/{opened.split}")


def _refuse_unwritable(cache: Path) -> None:
    """Raises: DatasetError: the package has no place for its files."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise DatasetError(
            f"the cache of datasets, {cache}, cannot be written ({error.strerror}): set HF_HOME to a folder that can"
        ) from error


def _opened(datasets: Any, opened: Opened) -> Any:
    """The dataset, memory-mapped. A stream is cut after `num_streamed` records, which are kept in the cache."""
    if (opened.path / "dataset_dict.json").is_file() or (opened.path / "state.json").is_file():
        if opened.subset:
            raise ValueError(f"a folder of save_to_disk has no data.subset, which is {opened.subset}")
        if opened.num_streamed:
            raise ValueError(f"a folder of save_to_disk is not streamed, and data.streamed_rows={opened.num_streamed}")
        found = datasets.load_from_disk(str(opened.path))
        return found[opened.split] if isinstance(found, datasets.DatasetDict) else found
    source, subset = str(opened.path), opened.subset or None
    if opened.num_streamed == 0:
        found = datasets.load_dataset(source, subset, split=opened.split)
        as_texts = _texts_of_csv(datasets, found.info)
        return datasets.load_dataset(source, subset, split=opened.split, features=as_texts) if as_texts else found
    name = "-".join(part.replace("/", "_") for part in (source, opened.subset, opened.split) if part)
    kept = opened.cache / f"stream-{name}-{opened.num_streamed}"
    if not kept.is_dir():
        stream = datasets.load_dataset(source, subset, split=opened.split, streaming=True).decode(False)
        written = datasets.Dataset.from_generator(
            lambda: islice(stream, opened.num_streamed),
            features=stream.features and as_files(datasets, stream.features),
            cache_dir=str(opened.cache / "generated"),
            writer_batch_size=STREAMED_RECORDS,
        )
        draft = kept.with_name(f".{kept.name}")
        written.save_to_disk(str(draft))
        draft.rename(kept)
    return datasets.load_from_disk(str(kept))


def _texts_of_csv(datasets: Any, info: Any) -> Any:
    """Features that are all texts for CSV files, which have no types: an answer of 007 must not become 7; else None."""
    if info.builder_name != "csv":
        return None
    return datasets.Features({name: datasets.Value("string") for name in info.features})


def as_files(datasets: Any, feature: Any) -> Any:
    """The feature with the files of images, sounds and videos in their place, at any depth of lists and structs.

    Decoded ones would be encoded again, and lose what they were; and sounds and videos need torchcodec.
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
    """The records of a memory-mapped dataset in the format arrow; `features` decode a record of it."""

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

    def record(self, place: int) -> Record:
        with self._lock:
            [record] = self._dataset[place].to_pylist()
        return self._features.decode_example(record)

    def name(self, place: int) -> str:
        return f"{self._name}:{place + 1}"
