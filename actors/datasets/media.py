"""Resolves images in dataset rows: paths, URLs (file, data, web), bytes, PIL images, arrays, mappings, and lists.

The result is a path below the data root, encoded bytes, or a web file to download later. Files are not decoded here:
`actors/processors/media.py` checks size and content.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpx
import numpy as np
from PIL import Image

from mobula.cluster.errors import MediaError, SkippedSample
from mobula.cluster.files import replacing
from mobula.cluster.proxies import ProxiedTransport

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
            return EncodedFile(_from_base64(data) if head.endswith(";base64") else unquote_to_bytes(data), name)
        if url.startswith(WEB):
            return self._fetch(url)
        if url.startswith("file://"):
            return self._path(unquote(urlsplit(url).path))
        raise ImageError(
            "bad_image", f"{url[:NUM_SHOWN]!r} is a URL that is not read: write a path, or a URL of http, file or data"
        )

    def _is_fit(self, path: Path) -> bool:
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


Audio = ImageSource
"""A path below the data root, or the encoded bytes of a file."""


ARRAY_KEYS = ("array", "samples")  # keys of samples in a mapping
RATE_KEYS = ("sampling_rate", "sample_rate")
FILE_KEYS = ("audio", "audio_url", "input_audio")  # keys of a sound in any form
MAX_CHANNELS = 32
WAV_FLOAT = 3  # format code of float samples


class AudioInputs(MediaInputs):
    """Resolves the sounds of rows. Samples are a mapping `{"array": float [N], [N, channels] or [channels, N],
    "sampling_rate": 16000}`, as in Hugging Face's `datasets`, or a pair `(array, rate)`. An array without a rate is
    refused."""

    noun = "sound"

    def each(self, value: Any) -> list[Any]:
        return list(flat(value, _is_pair))

    def _resolved(self, value: Any, name: str) -> Audio:
        if isinstance(value, Mapping):
            return self._from_audio_mapping(value, name)
        if _is_pair(value):
            return EncodedFile(encode_wav(*value), name)
        if hasattr(value, "__array__") or isinstance(value, list | tuple | Real):
            raise ImageError(
                "bad_audio", "samples without a rate are no sound: write {'array': SAMPLES, 'sampling_rate': 16000}"
            )
        return self._one(value, name)

    def _from_audio_mapping(self, value: Mapping[str, Any], name: str) -> Audio:
        samples = next((value[key] for key in ARRAY_KEYS if value.get(key) is not None), None)
        if samples is not None:
            rate = next((value[key] for key in RATE_KEYS if value.get(key) is not None), None)
            return EncodedFile(encode_wav(samples, rate), name)
        nested = next((value[key] for key in FILE_KEYS if value.get(key) is not None), None)
        if nested is not None:
            return self._resolved(nested, name)
        data = value.get("data")  # OpenAI's parts: {"data": BASE64, "format": "wav"}
        if isinstance(data, str):
            return self._one(f"data:audio/{value.get('format', 'wav')};base64,{data}", name)
        return self._from_mapping(value, name)


def _is_pair(value: Any) -> bool:
    is_two = isinstance(value, list | tuple) and len(value) == 2
    return is_two and hasattr(value[0], "__array__") and isinstance(_plain(value[1]), Real)


def _plain(rate: Any) -> Any:
    return rate.item() if hasattr(rate, "item") and np.ndim(rate) == 0 else rate


def encode_wav(samples: Any, rate: Any) -> bytes:
    """Encodes samples as a WAV file of float32; integers are scaled to [-1, 1]. The shorter axis is the channels."""
    rate = _plain(rate)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1 << 31 or rate != int(rate):
        raise ImageError("bad_audio", f"`sampling_rate` is {rate!r}: write how many samples a second there are")
    array = array_of(samples)
    if array.ndim == 2 and array.shape[0] < array.shape[1]:
        array = array.T
    if array.ndim not in (1, 2) or array.dtype.kind not in "fi" or (array.ndim == 2 and array.shape[1] > MAX_CHANNELS):
        raise ImageError(
            "bad_audio", f"an array of {array.dtype} {list(array.shape)} is no sound: give numbers [N] or [N, channels]"
        )
    if array.dtype.kind == "i":
        array = array / float(np.iinfo(array.dtype).max + 1)
    channels = 1 if array.ndim == 1 else array.shape[1]
    data = np.ascontiguousarray(array, dtype="<f4").tobytes()
    width = 4 * channels
    form = struct.pack("<HHIIHH", WAV_FLOAT, channels, int(rate), int(rate) * width, width, 32)
    head = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data))
    return b"RIFF" + struct.pack("<I", len(head) + len(data)) + head + data


FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")  # .gif is a video here
FRAME_MARKS = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"II*\0", b"MM\0*")  # signatures of image files
FRAME_KEYS = ("video", "frames", "video_url")  # keys of frames, or of a video in any form, in a mapping


@dataclass(frozen=True)
class FrameList:
    """A video as a list of images; `frame_rate` is in frames a second, None for `data.video.frame_rate`."""

    frames: tuple[ImageSource, ...]
    frame_rate: float | None
    name: str

    def __str__(self) -> str:
        return self.name


Video = Path | EncodedFile | WebFile | FrameList


class VideoInputs(MediaInputs):
    """Resolves the videos of rows; a path may be a file or a folder of frames."""

    noun = "video"

    def each(self, value: Any) -> list[Any]:
        """The videos of a value: None gives none, a list of images one, any other list several."""
        if is_absent(value):
            return []
        if not isinstance(value, list | tuple):
            return [value]
        given = [item for item in value if not is_absent(item)]
        return [given] if given and all(_is_frame(item) for item in given) else given

    def _resolved(self, value: Any, name: str) -> Video:
        if isinstance(value, list | tuple):
            return self._frames(value, name)
        if isinstance(value, Mapping) and (held := [value[key] for key in FRAME_KEYS if value.get(key) is not None]):
            video, rate = self._resolved(held[0], name), value.get("fps")
            return replace(video, frame_rate=_rate(rate)) if isinstance(video, FrameList) and rate else video
        if isinstance(value, Image.Image):
            raise ImageError("bad_video", "one image is no video: write a list of frames, or the column `images`")
        if hasattr(value, "__array__"):
            array = array_of(value)
            if array.ndim != 4:
                raise ImageError(
                    "bad_video", f"an array of {array.dtype} {list(array.shape)} is no video: give [T, H, W, C]"
                )
            return self._frames(list(array), name)
        file = self._one(value, name)
        if isinstance(file, Path) and file.is_dir():
            paths = sorted(path for path in file.iterdir() if path.suffix.lower() in FRAME_SUFFIXES)
            return self._frame_list([self._path(str(path.relative_to(self._root))) for path in paths], str(file))
        return file

    def _frames(self, frames: Sequence[Any], name: str) -> FrameList:
        return self._frame_list([self._one(f, f"{name}, frame {n}") for n, f in enumerate(frames, start=1)], name)

    def _frame_list(self, frames: Sequence[ImageSource], name: str) -> FrameList:
        if not frames:
            raise ImageError("bad_video", f"{name} has no frames: add images to the folder or list, or a file")
        return FrameList(tuple(frames), None, name)

    def _is_fit(self, path: Path) -> bool:
        return path.is_file() or path.is_dir()


def _is_frame(value: Any) -> bool:
    """Whether an item of a list is a frame, so that the list is one video. A GIF is a video, not a frame."""
    if isinstance(value, str) and value.startswith("data:"):
        return value.startswith("data:image/") and not value.startswith("data:image/gif")
    if isinstance(value, str | Path):
        return str(value).lower().endswith(FRAME_SUFFIXES)
    if isinstance(value, bytes | bytearray | memoryview):
        head = bytes(value[:12])
        return head.startswith(FRAME_MARKS) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")
    if isinstance(value, Mapping):
        held = next((value[key] for key in KEYS if value.get(key) is not None), None)
        return not any(value.get(key) is not None for key in FRAME_KEYS) and _is_frame(held)
    return isinstance(value, Image.Image) or (hasattr(value, "__array__") and np.ndim(value) <= 3)


def _rate(value: Any) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ImageError("bad_video", f"`fps` is {value!r}: write how many frames are shown a second")
    return rate


MAX_PARALLEL = 8  # downloads of one prompt


@dataclass(frozen=True)
class DownloadLimits:
    """The largest file of a kind of media, `data.max_redirects` and `data.download_timeout_s`."""

    max_bytes: int
    max_bytes_key: str  # configuration key of `max_bytes`
    max_redirects: int
    timeout_s: float


class MediaDownloads:
    """Downloads files into the cache `folder`, named by a hash of the URL."""

    def __init__(self, folder: Path, allowed_hosts: Collection[str], limits: DownloadLimits) -> None:
        self._folder = folder
        self._allowed = frozenset(host.lower() for host in allowed_hosts)
        self._limits = limits

    def fetch(self, url: str) -> Path:
        """Returns the file of a URL; downloads it unless it is cached."""
        self.check(url)
        path = self._folder / hashlib.sha256(url.encode()).hexdigest()
        if not path.is_file():
            try:
                self._download(url, path)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise _failed(url, f"{type(error).__name__}: {error}") from error
        return path

    def later(self, url: str) -> WebFile:
        """Checks the host at once, and leaves the download to the process that reads the file."""
        self.check(url)
        return WebFile(url, self.fetch)

    def check(self, url: str) -> None:
        """Raises: ImageError: the host of the URL is not allowed. Opens no connection."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = None
        self._check_host(parsed, url)

    def _download(self, url: str, path: Path) -> None:
        """Writes the file atomically."""
        limits, deadline = self._limits, time.monotonic() + self._limits.timeout_s
        client = httpx.Client(
            transport=ProxiedTransport(),
            follow_redirects=True,
            max_redirects=limits.max_redirects,
            timeout=limits.timeout_s,
            event_hooks={"request": [lambda request: self._check_host(request.url, url)]},  # also called for redirects
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        with client, client.stream("GET", url) as response:
            response.raise_for_status()
            num_bytes = 0
            with replacing(path) as draft:
                for chunk in response.iter_bytes():
                    num_bytes += len(chunk)
                    if num_bytes > limits.max_bytes:
                        raise _failed(url, f"it has more than {limits.max_bytes_key}={limits.max_bytes:,} bytes")
                    if time.monotonic() > deadline:
                        raise _failed(url, f"it took longer than data.download_timeout_s={limits.timeout_s:g}")
                    draft.write(chunk)

    def _check_host(self, url: httpx.URL | None, asked: str) -> None:
        host = url.host.lower() if url is not None else ""
        if url is None or url.scheme not in ("http", "https") or host not in self._allowed:
            raise ImageError(
                "host_not_allowed",
                f"{asked[:NUM_SHOWN_OF_URL]} is on {host or 'no host'}, which data.allowed_hosts does not have: "
                "add the host, or store the file in the data folder",
            )


def web_files(media: Iterable[Video]) -> list[WebFile]:
    """The web files among images, videos, frames and sounds; each URL once."""
    files = (file for medium in media for file in (medium.frames if isinstance(medium, FrameList) else (medium,)))
    return list({file.url: file for file in files if isinstance(file, WebFile)}.values())


def fetch_together(media: Iterable[Video]) -> None:
    """Downloads the web files among `media` in parallel."""
    files = web_files(media)
    if files:
        with ThreadPoolExecutor(min(len(files), MAX_PARALLEL)) as pool:
            list(pool.map(WebFile.local, files))


def _failed(url: str, reason: str) -> ImageError:
    return ImageError(
        "download_failed", f"{url[:NUM_SHOWN_OF_URL]} cannot be downloaded ({reason}): check the URL, or remove its row"
    )
