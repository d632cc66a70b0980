"""Sounds and videos of a row, and downloads of media within limits."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from mobula.actors.datasets.images import (
    KEYS,
    NUM_SHOWN_OF_URL,
    EncodedFile,
    ImageError,
    ImageSource,
    MediaInputs,
    WebFile,
    array_of,
    flat,
    is_absent,
)
from mobula.cluster.files import replacing
from mobula.cluster.proxies import ProxiedTransport

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
    """Whether the value is a pair of samples and rate."""
    is_two = isinstance(value, list | tuple) and len(value) == 2
    return is_two and hasattr(value[0], "__array__") and isinstance(_plain(value[1]), Real)


def _plain(rate: Any) -> Any:
    """Converts a scalar of numpy or torch to Python."""
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
