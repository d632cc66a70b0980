"""Writer: records of one split into files that the reader of the same name reads again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from mobula.cluster.records.rgb import FORMATS

EXTENSIONS = {"JPEG": "jpg", "TIFF": "tif"}  # of the others it is their name


@dataclass(frozen=True)
class PictureFile:
    """A whole picture file, and where it came from."""

    content: bytes
    name: str

    @property
    def extension(self) -> str:
        """By its content."""
        with Image.open(BytesIO(self.content), formats=FORMATS) as image:
            return EXTENSIONS.get(str(image.format), str(image.format).lower())


@dataclass(frozen=True)
class VideoFile:
    """A whole video file, where it came from, and the end that its name gets."""

    content: bytes
    name: str
    extension: str


@dataclass(frozen=True)
class AudioFile:
    """A whole sound file, where it came from, and the end that its name gets."""

    content: bytes
    name: str
    extension: str


MediaFile = PictureFile | VideoFile | AudioFile


class Writer(Protocol):
    """Takes records one by one. Files appear when it is closed, or as it goes."""

    def images(self, files: list[PictureFile]) -> list[Any]:
        """Stores the pictures of the next record; what the record is to name them by."""
        ...

    def videos(self, files: list[VideoFile]) -> list[Any]:
        """The same for its videos."""
        ...

    def audios(self, files: list[AudioFile]) -> list[Any]:
        """The same for its sounds."""
        ...

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


OpenWriter = Callable[[Path, str], Writer]
"""(folder, split) -> a writer."""
