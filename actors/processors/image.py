"""Decodes image files to RGB images. File size and number of pixels are checked before reading and decoding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Generic, TypeVar

from PIL import Image

from mobula.actors.datasets.images import EncodedFile, ImageSource, WebFile
from mobula.cluster.errors import MediaError
from mobula.cluster.records.media import FORMATS, to_rgb, upright_size
from mobula.configs.schema.data import DataConfig

S = TypeVar("S")
M = TypeVar("M")


@dataclass(frozen=True)
class LoadedMedium(Generic[S, M]):
    """The bytes of an image, video or sound, not decoded. `measure` determines the number of its tokens."""

    source: S
    measure: M  # (width, height) of an image, the sampled `Clip` of a video, samples of a sound after resampling
    contents: tuple[bytes, ...]  # the file; for a video that is a list of files, the files of the sampled frames
    taken: tuple[int, ...] = ()  # presentation times (PTS) of the sampled frames of a video file, in its time base


def check_image(source: ImageSource, data: DataConfig) -> tuple[int, int]:
    """Returns (width, height) of the upright image from the file's header; for checks of a whole dataset."""
    with _open_file(source, data) as file:
        return _measured(file, source, data)


def read_image(source: ImageSource, data: DataConfig) -> bytes:
    with _open_file(source, data) as file:
        return file.read()


def load_image(source: ImageSource, data: DataConfig) -> LoadedMedium[ImageSource, tuple[int, int]]:
    content = read_image(source, data)
    return LoadedMedium(source, measure_image(content, source, data), (content,))


def measure_image(content: bytes, source: ImageSource, data: DataConfig) -> tuple[int, int]:
    """Returns (width, height) of the upright image from the header in `content`, the bytes of the file `source`."""
    return _measured(BytesIO(content), source, data)


def decode_image(content: bytes, source: object, data: DataConfig) -> Image.Image:
    """Returns the image as RGB: upright by the EXIF orientation, transparency on white, the first of several frames.
    `source` is its name in errors."""
    with _open_image(BytesIO(content), source, data) as image:
        with _refusing_corrupt(source):
            image.load()
            return to_rgb(image)


def _measured(file: IO[bytes], source: ImageSource, data: DataConfig) -> tuple[int, int]:
    with _open_image(file, source, data) as image, _refusing_corrupt(source):
        return upright_size(image)


@contextmanager
def _refusing_corrupt(source: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # on damaged files decoders raise errors of any type
        raise MediaError(f"{source} is corrupt ({error}): replace the file or remove its row") from error


def _open_file(source: ImageSource, data: DataConfig) -> AbstractContextManager[IO[bytes]]:
    return open_bounded(source, data.max_image_bytes, "data.max_image_bytes")


@contextmanager
def open_bounded(source: ImageSource, max_bytes: int, key: str) -> Iterator[IO[bytes]]:
    """Checks the file's size and opens it; `key` is the configuration key of `max_bytes`."""
    if isinstance(source, EncodedFile):
        _check_num_bytes(source, len(source.content), max_bytes, key)
        yield BytesIO(source.content)
        return
    path = source.local() if isinstance(source, WebFile) else source
    try:
        if not path.is_file():  # checked first: opening a named pipe would block
            raise MediaError(f"{path} is missing or no regular file: add the file or remove its row")
        with path.open("rb") as file:
            _check_num_bytes(path, os.fstat(file.fileno()).st_size, max_bytes, key)
            yield file
    except OSError as error:
        raise MediaError(f"{path} cannot be read ({error}): make it readable or remove its row") from error


def _check_num_bytes(path: ImageSource, num_bytes: int, max_bytes: int, key: str) -> None:
    if num_bytes == 0:
        raise MediaError(f"{path} is empty: replace the file or remove its row")
    if num_bytes > max_bytes:
        raise MediaError(
            f"{path} has {num_bytes:,} bytes, {key} is {max_bytes:,}: make the file smaller or raise the limit"
        )


def _open_image(file: IO[bytes], source: object, data: DataConfig) -> Image.Image:
    """Reads the header; decodes no pixels."""
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise MediaError(f"{source} is a decompression bomb ({error}): replace the file or remove its row") from error
    except Exception as error:  # on damaged headers Pillow raises errors of any type
        raise MediaError(f"{source} is no {', '.join(FORMATS)} image: replace the file or remove its row") from error
    width, height = image.size
    if not 0 < width * height <= data.max_decoded_pixels:
        raise MediaError(
            f"{source} decodes to {width} x {height} = {width * height:,} pixels, "
            f"data.max_decoded_pixels is {data.max_decoded_pixels:,}: make the image smaller or raise the limit"
        )
    return image
