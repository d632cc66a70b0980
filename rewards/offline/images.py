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
FRAME_KEYS = ("frames", "video")  # under which a mapping holds frames
FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
MAX_BYTES = 64 << 20  # of one file
NUM_AT_HAND = 64  # cached files of one process: responses to one prompt are consecutive
_URL = "data:"
VIDEO = "video"


@dataclass(frozen=True)
class VideoFileName:
    """A video that a record names as one file: which frames of it a run would show is not known here."""

    name: str


Named = str | bytes | VideoFileName
"""A path, a data URL, or the file itself as Parquet holds it."""


def named_frames(values: Mapping[str, Any]) -> tuple[Named, ...]:
    """The frames of the videos that a record names: of each a list of images, or a mapping with one."""
    found: list[Named] = []
    for value in (values.get(key) for key in VIDEO_KEYS):
        videos = value if isinstance(value, list | tuple) and not _are_frames(value) else [value]
        for video in videos:
            found += _frames(video)
    return tuple(found)


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
    """The images that a record names under `keys`, one or a list; what is none is kept as its text, to be named."""
    found: list[Named] = []
    for value in (values.get(key) for key in keys):
        items = value if isinstance(value, list | tuple) else [value]
        found += [_named(item) for item in items if item is not None and not _is_sound(item)]
    return tuple(found)


def _is_sound(value: Any) -> bool:
    """Of a recorded trajectory; reward functions are given none."""
    return isinstance(value, Mapping) and value.get("modality") == "audio"


def _named(value: Any) -> Named:
    if isinstance(value, Mapping):  # as data sets keep images in Parquet
        if value.get("modality") == VIDEO:  # of a recorded trajectory
            return VideoFileName(str(value.get("source")))
        value = value.get("bytes") or value.get("path") or value.get("source")
    return value if isinstance(value, str | bytes) else str(value)


class ImageFiles:
    """Reads named images; paths that are not absolute begin in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = lru_cache(maxsize=NUM_AT_HAND)(self._read_file)

    def read(self, named: Sequence[Named]) -> tuple[bytes, ...]:
        """The files, in order.

        Raises:
            RewardError: one cannot be read, is too large, or a data URL holds none; or it is a video in one file.
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
