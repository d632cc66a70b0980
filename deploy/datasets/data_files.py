"""The files of the training rows as part of what a run is: other files give the rows another order."""

from __future__ import annotations

from typing import Any

from actors.datasets.readers.base import Opened, files_of
from actors.datasets.readers.fingerprint import fingerprint_of
from cluster.errors import DatasetError
from cluster.replay.run_identity import run_identity
from configs.schema import RunConfig

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".tar", ".txt")
TRAIN = "train"  # the split
KEY = "the training files in data.path"
USABLE_ROWS = "the usable rows of these files, which depend on lengths, columns and media"


def identity_with_data(config: RunConfig, usable_rows: str = "") -> dict[str, Any]:
    """The identity of the run, with a fingerprint of the files of its training rows where they are on this machine.

    `usable_rows` is that of the rows that can be prompts, once they are checked.
    """
    found = {KEY: _fingerprint(config), USABLE_ROWS: usable_rows}
    return run_identity(config) | {key: fingerprint for key, fingerprint in found.items() if fingerprint}


def _fingerprint(config: RunConfig) -> str:
    data = config.data
    sources = [(data.path / s.path, s.splits) for s in data.sources.values()] or [(data.path, data.splits)]
    try:
        return fingerprint_of(
            file
            for path, splits in sources
            for file in files_of(Opened(path, splits.get(TRAIN, TRAIN), data.cache_path, 0, "", 0), SUFFIXES)
        )
    except (DatasetError, OSError):  # rows of the hub or of an environment, or files that are written at the start
        return ""
