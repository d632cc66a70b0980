"""Reads the images of a record, including frames of videos."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mobula.cluster.errors import RewardError

VIDEO_KEYS = ("video", "videos")
FRAME_KEYS = ("frames", "video")  # of the frames in a mapping
FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
MAX_BYTES = 64 << 20  # of one file
MAX_CACHED = 64  # files of one process: responses to one prompt are consecutive
_URL = "data:"
VIDEO = "video"


@dataclass(frozen=True)
class VideoFileName:
    """A video in one file; the frames that a run would show are unknown here."""

    name: str


Named = str | bytes | VideoFileName
"""A path, a data URL, the bytes of a file, or a video file."""


def named_frames(values: Mapping[str, Any]) -> tuple[Named, ...]:
    """Returns the frames of the videos of a record: each video is a list of images, or a mapping with a list."""
    frames: list[Named] = []
    for value in (values.get(key) for key in VIDEO_KEYS):
        videos = value if isinstance(value, list | tuple) and not _are_frames(value) else [value]
        for video in videos:
            frames += _frames(video)
    return tuple(frames)


def _frames(video: Any) -> Sequence[Named]:
    if video is None:
        return ()
    if isinstance(video, Mapping):
        held = next((video[key] for key in FRAME_KEYS if video.get(key) is not None), None)
        if held is not None:
            return _frames(held)
    if isinstance(video, list | tuple) and _are_frames(video):
        return [_named(frame) for frame in video]
    named = video.get("path") or video.get("source") or "held in the record" if isinstance(video, Mapping) else video
    return [VideoFileName(named if isinstance(named, str) else "held in the record")]


def _are_frames(items: Sequence[Any]) -> bool:
    return bool(items) and all(_is_frame(item) for item in items)


def _is_frame(item: Any) -> bool:
    if isinstance(item, Mapping):
        return not any(key in item for key in FRAME_KEYS) and (
            isinstance(item.get("bytes"), bytes) or _is_frame(item.get("path"))
        )
    return isinstance(item, bytes) or (
        isinstance(item, str) and (item.startswith("data:image/") or item.lower().endswith(FRAME_SUFFIXES))
    )


def named_images(values: Mapping[str, Any], *keys: str) -> tuple[Named, ...]:
    """Returns the images of a record under `keys`, one or a list. Other values are kept as text, for the error."""
    named: list[Named] = []
    for value in (values.get(key) for key in keys):
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            is_audio = isinstance(item, Mapping) and item.get("modality") == "audio"  # in a recorded trajectory
            if item is not None and not is_audio:
                named.append(_named(item))
    return tuple(named)


def _named(value: Any) -> Named:
    if isinstance(value, Mapping):  # an image in Parquet
        if value.get("modality") == VIDEO:  # in a recorded trajectory
            return VideoFileName(str(value.get("source")))
        value = value.get("bytes") or value.get("path") or value.get("source")
    return value if isinstance(value, str | bytes) else str(value)


class ImageFiles:
    """Reads image files; relative paths start in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = lru_cache(maxsize=MAX_CACHED)(self._read_file)

    def read(self, named: Sequence[Named]) -> tuple[bytes, ...]:
        """Returns the contents of the files, in order.

        Raises:
            RewardError: a file cannot be read or is too large, a data URL is invalid, or a name is a video in one file.
        """
        for name in named:
            if isinstance(name, VideoFileName):
                raise RewardError(
                    f"the video {name.name[:200]!r} is one file, and which of its frames were shown is not known: "
                    'name its frames, "videos": [["0.png", "1.png"]]'
                )
        return tuple(name if isinstance(name, bytes) else self._content(str(name)) for name in named)

    def _content(self, name: str) -> bytes:
        return _decoded(name) if name.startswith(_URL) else self._read(name)

    def _read_file(self, name: str) -> bytes:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RewardError(f"image {path} cannot be read ({reason})") from error
        if len(content) > MAX_BYTES:
            raise RewardError(f"image {path} has more than {MAX_BYTES:,} bytes")
        return content


def _decoded(url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if comma and head.endswith(";base64"):
            return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RewardError(f"image {url[:40]!r}... is no base64 ({error})") from error
    raise RewardError(f"image {url[:40]!r}... is no data URL of base64")
