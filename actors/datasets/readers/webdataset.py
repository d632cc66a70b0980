"""Reads WebDataset shards: tar files in which members of a sample are adjacent and share the name up to the first dot.

`000012.json` is the record; `000012.png` (or `000012.0.jpg`, `000012.1.jpg`) are images in order; `000012.mp4` (or
`000012.0.mp4`, ...) videos; `000012.wav` (or `000012.0.flac`, ...) sounds. A GIF is a video if the name has `video`,
`000012.video.gif`. A text member such as `000012.question.txt` or `000012.answer` is the column `question.txt` or
`answer`, without byte order mark and final line break.
"""

from __future__ import annotations

import os
import tarfile
from array import array
from pathlib import Path

import numpy as np

from mobula.actors.datasets.images import EncodedFile
from mobula.actors.datasets.readers.base import SUFFIXES, Opened, Record, Table, files_of, read_one_by_one
from mobula.actors.datasets.readers.json_files import parse_object
from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.json_lines import refuse_compressed

IMAGES = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff")
VIDEOS = ("mp4", "mkv", "avi", "mov", "webm", "mpeg", "mpg", "ogv", "flv")
SOUNDS = ("wav", "flac", "mp3", "ogg", "aiff", "aif", "m4a", "mka", "aac")


def open_webdataset(opened: Opened) -> Table:
    """Raises: DatasetError: a shard is no tar file, is compressed, or is truncated."""
    return ShardTable(opened.path, files_of(opened, SUFFIXES["webdataset"]))


class ShardTable:
    """Implements `Table` for samples of tar files; only names and offsets of members are in memory."""

    def __init__(self, root: Path, files: list[Path]) -> None:
        self.root = root
        self.source = str(files[0])
        self._files = files
        self._extensions: list[str] = []
        # By member:
        self._starts = array("q")  # offset in the shard
        self._sizes = array("q")
        self._kinds = array("i")  # index of the extension in `_extensions`
        # By sample:
        self._first = array("q")  # first member
        self._shards = array("i")
        numbers: dict[str, int] = {}
        for shard, file in enumerate(files):
            try:
                refuse_compressed(file)
                self._index(shard, file, numbers)
            except ValueError as error:
                raise DatasetError(str(error)) from error
            except tarfile.TarError as error:
                raise DatasetError(
                    f"{file} is no uncompressed tar file ({error}): write it again, without compression"
                ) from error
        self._first.append(len(self._starts))
        self._extensions = list(numbers)
        self._descriptors = [os.open(file, os.O_RDONLY) for file in files]

    @property
    def blocks(self) -> np.ndarray:
        return read_one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._shards)

    def __del__(self) -> None:
        for descriptor in self.__dict__.pop("_descriptors", []):
            os.close(descriptor)

    def record(self, index: int) -> Record:
        record: dict[str, object] = {}
        images: list[EncodedFile] = []
        videos: list[EncodedFile] = []
        audios: list[EncodedFile] = []
        for member in range(self._first[index], self._first[index + 1]):
            extension = self._extensions[self._kinds[member]]
            last = extension.rpartition(".")[2].lower()
            content = os.pread(self._descriptors[self._shards[index]], self._sizes[member], self._starts[member])
            if last in VIDEOS or "video" in extension.lower().split("."):
                videos.append(EncodedFile(content, f"{self.name(index)} .{extension}"))
            elif last in SOUNDS:
                audios.append(EncodedFile(content, f"{self.name(index)} .{extension}"))
            elif last in IMAGES:
                images.append(EncodedFile(content, f"{self.name(index)} .{extension}"))
            elif last == "json":
                record.update(parse_object(content, f".{extension} of the sample"))
            else:
                record[extension] = _text(content, extension)
        media = {"images": images, "videos": videos, "audios": audios}
        return {**record, **{column: files for column, files in media.items() if files}}

    def name(self, index: int) -> str:
        """The shard, and the number in the shard."""
        shard = self._shards[index]
        first = int(np.searchsorted(np.frombuffer(self._shards, dtype=np.int32), shard))
        return f"{self._files[shard].name}:{index - first + 1}"

    def _index(self, shard: int, file: Path, numbers: dict[str, int]) -> None:
        key = None
        with tarfile.open(file, "r:") as members:
            for member in members:
                members.members = []  # type: ignore[attr-defined]  # tarfile would keep every header in memory
                folder, _, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if not member.isfile() or not dot or not stem:
                    continue
                if (folder, stem) != key:
                    key = (folder, stem)
                    self._first.append(len(self._starts))
                    self._shards.append(shard)
                self._starts.append(member.offset_data)
                self._sizes.append(member.size)
                self._kinds.append(numbers.setdefault(extension, len(numbers)))
            end = members.offset
        with file.open("rb") as content:
            content.seek(end)
            if content.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("unexpected end of data")


def _text(content: bytes, extension: str) -> str:
    try:
        return content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RowError(
            "bad_text", f"the member .{extension} is no text ({error}): remove it, or name it .json"
        ) from error
