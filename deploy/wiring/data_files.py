"""Data sets that Python packages bring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mobula.actors.datasets.readers.base import SUFFIXES, Opened, files_of
from mobula.actors.datasets.readers.parquet import fingerprint_of
from mobula.cluster.errors import DatasetError
from mobula.cluster.replay.run_identity import run_identity
from mobula.configs.schema import RunConfig
from mobula.configs.schema.data import DataKind, SourceConfig

OF_DATASETS = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv")  # that the package datasets reads


TRAIN = "train"  # the split


KEY = "the training files in data.path"


USABLE_ROWS = "the usable rows of these files, which depend on lengths, columns and media"


def identity_with_data(config: RunConfig, usable_rows: str = "") -> dict[str, Any]:
    """Returns the run's identity, with a fingerprint of the training files if they are on this machine.

    `usable_rows` is the fingerprint of the rows that passed the checks.
    """
    fingerprints = {KEY: _fingerprint(config), USABLE_ROWS: usable_rows}
    return run_identity(config) | {key: fingerprint for key, fingerprint in fingerprints.items() if fingerprint}


def _fingerprint(config: RunConfig) -> str:
    data = config.data
    sources: list[tuple[Path, SourceConfig]] = [(data.path / s.path, s) for s in data.mixture.sources.values()]
    sources = sources or [(data.path, data)]
    try:
        return fingerprint_of(
            file
            for path, source in sources
            for file in files_of(Opened(path, _split(source), data.cache_path, 0, "", 0), _suffixes(config, source))
        )
    except (DatasetError, OSError):  # rows of the hub or of an environment, or files that are written at the start
        return ""


def _split(source: SourceConfig) -> str:
    """Returns the name of the training split without a slice such as `train[:90%]`."""
    name = source.splits.get(TRAIN, TRAIN)
    return name.partition("[")[0] if source.kind is DataKind.HUGGINGFACE else name


def _suffixes(config: RunConfig, source: SourceConfig) -> Sequence[str]:
    kind = DataKind.JSONL if config.offline.is_on else source.kind
    return SUFFIXES.get(kind, OF_DATASETS)
