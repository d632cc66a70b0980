"""Resolves images in dataset rows: paths, URLs (file, data, web), bytes, PIL images, arrays, mappings, and lists.

The result is a path below the data root, encoded bytes, or a web file to download later. Files are not decoded here:
`actors/processors/image.py` checks size and content.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
from PIL import Image

from mobula.cluster.errors import MediaError, SkippedSample

# Keys of an image in a mapping, by priority.
KEYS = ("bytes", "path", "url", "image_url", "image", "source")
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # folders of a repository in the hub's cache
WEB = ("http://", "https://")
SCHEME = re.compile(r"(data(?=:)|[a-z][a-z0-9+.-]*(?=://))", re.ASCII | re.IGNORECASE)  # of a URL
# Base64 without the head of a data URL: starts with the signature of PNG, JPEG, WebP or GIF, and has no dot.
BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|UklGR|R0lGOD)[A-Za-z0-9+/\s]{80,}+={0,2}\s*")
WITHOUT_PNG = ("CMYK", "YCbCr", "HSV", "RGBX", "RGBa")  # Pillow modes that PNG does not support
NUM_SHOWN = 80  # characters of a value in an error message
NUM_SHOWN_OF_URL = 200


@dataclass(frozen=True)
class EncodedFile:
    """The bytes of an image or video file; `name` is the origin, for errors."""

    content: bytes = field(repr=False)
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class WebFile:
    """A file of a web URL. The process that reads the file downloads it."""

    url: str
    fetch: Callable[[str], Path] = field(repr=False)  # `MediaDownloads.fetch`

    def local(self) -> Path:
        """Returns the local path; downloads the file unless it is cached on this node."""
        return self.fetch(self.url)

    def __str__(self) -> str:
        return self.url[:NUM_SHOWN_OF_URL]


ImageSource = Path | EncodedFile | WebFile


class ImageError(SkippedSample):
    """A row has an invalid image; `reason` is the name of the counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


Fetch = Callable[[str], Path | WebFile]
"""Resolves a web URL. Raises: ImageError: the host is not allowed, or the download failed."""


class MediaInputs:
    """Resolves media of rows. Paths are confined to `root` after following symbolic links."""

    noun: ClassVar[str]  # in names of media without a name

    def __init__(self, root: Path, fetch: Fetch, *, takes_absolute: bool) -> None:
        """`takes_absolute` allows absolute paths; paths in file URLs are always absolute."""
        self._root = root.resolve()
        self._fetch = fetch
        self._takes_absolute = takes_absolute

    def resolve(self, value: Any, name: str) -> tuple[Any, ...]:
        """Resolves the media of `each`, in order; `name` is the name of the row, for media without a name."""
        values = self.each(value)
        names = [name] if len(values) == 1 else [f"{name}, {self.noun} {n}" for n in range(1, len(values) + 1)]
        return tuple(self._resolved(item, item_name) for item, item_name in zip(values, names, strict=True))

    def each(self, value: Any) -> list[Any]:
        """The media of a value of a row: none, one, or those of a list, which is nested at most once."""
        return list(flat(value))

    def _resolved(self, value: Any, name: str) -> Any:
        """Resolves one medium."""
        return self._one(value, name)

    def _one(self, value: Any, name: str) -> ImageSource:
        match value:
            case EncodedFile():
                return value
            case str():
                return self._named(value, name)
            case Path():
                return self._named(str(value), name)
            case bytes() | bytearray() | memoryview():
                return EncodedFile(bytes(value), name)
            case Mapping():
                return self._from_mapping(value, name)
            case Image.Image():
                return _encoded(value, name)
        if hasattr(value, "__array__"):
            return _encoded(_from_array(array_of(value)), name)
        raise _no_image(value)

    def _named(self, text: str, name: str) -> ImageSource:
        scheme = SCHEME.match(text)
        if scheme is not None:
            return self._of_url(scheme[1].lower() + text[scheme.end(1) :], name)
        if BASE64.fullmatch(text):
            return EncodedFile(_from_base64(text), name)
        if text.startswith("/") and not self._takes_absolute:
            raise ImageError(
                "outside_folder",
                f"{text!r} is an absolute path: write it relative to {self._root}, or set data.media_path",
            )
        return self._path(text)

    def _of_url(self, url: str, name: str) -> ImageSource:
        """`url` has a lower-case scheme."""
        if url.startswith("data:"):
            head, comma, data = url.partition(",")
            if not comma:
                raise ImageError("bad_image", f"{url[:NUM_SHOWN]!r} is no data URL: write data:image/png;base64,DATA")
            content = _from_base64(data) if head.endswith(";base64") else unquote_to_bytes(data)
            return EncodedFile(content, name)
        if url.startswith(WEB):
            return self._fetch(url)
        if url.startswith("file://"):
            return self._path(unquote(urlsplit(url).path))
        raise ImageError(
            "bad_image", f"{url[:NUM_SHOWN]!r} is a URL that is not read: write a path, or a URL of http, file or data"
        )

    def _is_fit(self, path: Path) -> bool:
        """Whether a path below the root can be read."""
        return path.is_file()

    def _from_mapping(self, value: Mapping[str, Any], name: str) -> ImageSource:
        held = next((value[key] for key in KEYS if not _is_empty(value.get(key))), None)
        encoded = value.get("data") if held is None else value.get("bytes")
        if isinstance(encoded, str):  # JSON has no bytes
            return EncodedFile(_from_base64(encoded), name)
        if held is None:
            raise _no_image(value)
        nested = list(flat(held))
        if len(nested) != 1:
            raise _no_image(value)
        path = value.get("path")
        return self._one(nested[0], path if isinstance(path, str) and path else name)

    def _path(self, text: str) -> Path:
        """The absolute path of a file below the root."""
        try:
            path = path_below(self._root, text)
            is_file = path is not None and self._is_fit(path)
        except (OSError, RuntimeError, ValueError) as error:  # name too long, loop of links, NUL character
            raise ImageError(
                "missing_file", f"the path {text[:NUM_SHOWN]!r} is unusable ({error}): fix `image`"
            ) from error
        if path is None:
            raise ImageError(
                "outside_folder",
                f"{text!r} leads out of the data folder {self._root}: use a path below it, or set data.media_path",
            )
        if not is_file:
            raise ImageError("missing_file", f"there is no file {path}: add it, or fix `image`")
        return path


class ImageInputs(MediaInputs):
    """Resolves the images of rows."""

    noun = "image"


def path_below(root: Path, text: str) -> Path | None:
    """Resolves `text` relative to `root` (a resolved path), following links; None if the result is outside `root`. In
    the hub's cache, files of a snapshot are links to the folder `blobs` of the repository. Such links are allowed if
    the unresolved path is below the snapshot."""
    path = (root / text).resolve()
    if path.is_relative_to(root):
        return path
    named = Path(os.path.normpath(root / text))
    snapshots = next((folder for folder in (root, *root.parents) if folder.parent.name == SNAPSHOTS), None)
    is_blob = snapshots is not None and path.parent == snapshots.parent.parent / BLOBS
    return named if named.is_relative_to(root) and is_blob else None


def flat(value: Any, is_item: Callable[[Any], bool] = lambda given: False) -> Iterator[Any]:
    """Yields the items of a value: none, a single item, a list, or a list of lists. Absent items are skipped.
    `is_item`: whether a list is one item."""
    for item in value if isinstance(value, list | tuple) and not is_item(value) else [value]:
        for inner in item if isinstance(item, list | tuple) and not is_item(item) else [item]:
            if not is_absent(inner):
                yield inner


def is_absent(value: Any) -> bool:
    """Whether a medium is absent: null, NaN, an empty text, or an object without fields."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or (isinstance(value, str | Mapping) and not value)


def _is_empty(value: Any) -> bool:
    """Whether a field of a mapping is empty: null, or empty bytes or text."""
    return value is None or (isinstance(value, str | bytes) and not value)


def _no_image(value: Any) -> ImageError:
    shown = f"{type(value).__name__} {value!r}"[:NUM_SHOWN]
    return ImageError(
        "bad_image", f"{shown} is no image: write a path, a URL or the bytes of a file, or a list of them"
    )


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # MIME wraps lines
    except (binascii.Error, ValueError) as error:
        raise ImageError("bad_image", f"{text[:NUM_SHOWN]!r} is no base64 ({error}): encode the file again") from error


def array_of(value: Any) -> np.ndarray:
    """Converts an array or a tensor on any device to numpy; bfloat16 becomes float32."""
    try:
        if hasattr(value, "detach"):  # a tensor; torch is not imported here
            value = value.detach()
            value = (value.float() if value.dtype.is_floating_point else value).cpu()
        return np.asarray(value)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ImageError(
            "bad_image", f"a {type(value).__name__} has no values that can be read ({error}): give an array"
        ) from error


def _from_array(array: np.ndarray) -> Image.Image:
    """Converts uint8 or float in [0, 1] to an image: [H, W], [H, W, C] with 1, 3 or 4 channels, or [C, H, W]."""
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    is_grey = array.ndim == 3 and array.shape[2] == 1
    grey = array[:, :, 0] if is_grey else array
    is_shaped = grey.size > 0 and (grey.ndim == 2 or (grey.ndim == 3 and grey.shape[2] in (3, 4)))
    if not is_shaped or not (grey.dtype == np.uint8 or grey.dtype.kind == "f"):
        raise ImageError(
            "bad_image",
            f"an array of {array.dtype} {list(array.shape)} is no image: give [H, W] or [H, W, C] with 1, 3 or "
            "4 channels, of uint8, or of float in [0, 1]",
        )
    if grey.dtype.kind == "f":
        low, high = float(grey.min()), float(grey.max())
        if not (low >= 0 and high <= 1):  # true for NaN
            raise ImageError(
                "bad_image",
                f"an array of {array.dtype} {list(array.shape)} has values from {low:g} to {high:g}: bring them to "
                "[0, 1], or give uint8",
            )
        grey = (grey.astype(np.float32) * 255).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(grey))


def _encoded(image: Image.Image, name: str) -> EncodedFile:
    """Encodes an image as PNG; keeps the EXIF orientation of a file."""
    buffer = BytesIO()
    try:
        stored = image.convert("RGBA" if image.mode == "RGBa" else "RGB") if image.mode in WITHOUT_PNG else image
        stored.save(buffer, format="PNG", exif=image.getexif())
    except Exception as error:  # other modes without PNG support, and files that Pillow opens but cannot decode
        raise MediaError(f"{name} cannot be written as PNG ({error}): convert the image to RGB") from error
    return EncodedFile(buffer.getvalue(), name)
