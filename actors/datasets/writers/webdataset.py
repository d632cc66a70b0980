"""WebDataset shards: a record and its pictures, videos and sounds as members that follow each other."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from mobula.actors.datasets.writers.base import AudioFile, MediaFile, PictureFile, VideoFile

SHARD_SAMPLES = 1000


class ShardWriter:
    """Shards of SHARD_SAMPLES samples."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder = folder
        self._split = split
        self._num_samples = 0
        self._shard: tarfile.TarFile | None = None
        self._media: list[MediaFile] = []  # of the next record

    def images(self, files: list[PictureFile]) -> list[Any]:
        """No names: a reader takes the members beside the record."""
        self._media = [*files]
        return []

    def videos(self, files: list[VideoFile]) -> list[Any]:
        """As `images`, behind which it is called. The name of a member says that it is a video."""
        self._media += files
        return []

    def audios(self, files: list[AudioFile]) -> list[Any]:
        """As `videos`, behind which it is called."""
        self._media += files
        return []

    def write(self, record: dict[str, Any]) -> None:
        if self._num_samples % SHARD_SAMPLES == 0:
            self.close()
            name = f"{self._split}-{self._num_samples // SHARD_SAMPLES:06}.tar"
            self._shard = tarfile.open(self._folder / name, "w")
        key = f"{self._num_samples:09}"
        self._add(f"{key}.json", json.dumps(record, ensure_ascii=False).encode())
        for number, medium in enumerate(self._media):
            kind = "video." if isinstance(medium, VideoFile) else ""
            self._add(f"{key}.{number}.{kind}{medium.extension}", medium.content)
        self._num_samples += 1

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()

    def _add(self, name: str, content: bytes) -> None:
        assert self._shard is not None, "a record has a shard"
        info = tarfile.TarInfo(name)
        info.size = len(content)
        self._shard.addfile(info, io.BytesIO(content))
