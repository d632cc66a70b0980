"""JSONL and JSON files, with media in the folders `images`, `videos` and `sounds` beside them, each once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mobula.actors.datasets.writers.base import AudioFile, MediaFile, PictureFile, VideoFile

PICTURES, VIDEOS, SOUNDS = "images", "videos", "sounds"


class JsonLinesWriter:
    """One object a line."""

    first, between, last, suffix = "", "\n", "\n", ".jsonl"

    def __init__(self, folder: Path, split: str) -> None:
        self._folder = folder
        self._file = (folder / f"{split}{self.suffix}").open("w", encoding="utf-8")
        self._file.write(self.first)
        self._is_empty = True

    def images(self, files: list[PictureFile]) -> list[str]:
        return [self._stored(file, PICTURES) for file in files]

    def videos(self, files: list[VideoFile]) -> list[str]:
        return [self._stored(file, VIDEOS) for file in files]

    def audios(self, files: list[AudioFile]) -> list[str]:
        return [self._stored(file, SOUNDS) for file in files]

    def write(self, record: dict[str, Any]) -> None:
        if not self._is_empty:
            self._file.write(self.between)
        self._file.write(json.dumps(record, ensure_ascii=False))
        self._is_empty = False

    def close(self) -> None:
        self._file.write(self.last)
        self._file.close()

    def _stored(self, file: MediaFile, place: str) -> str:
        """The path of the file, relative to the folder; its name is a hash of its content."""
        name = f"{place}/{hashlib.sha256(file.content).hexdigest()[:24]}.{file.extension}"
        path = self._folder / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(file.content)
        return name


class JsonArrayWriter(JsonLinesWriter):
    """One array of objects."""

    first, between, last, suffix = "[\n", ",\n", "\n]\n", ".json"
