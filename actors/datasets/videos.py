"""Resolves videos in dataset rows: files (as for images), and frames as folders, lists of images or arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mobula.actors.datasets.images import (
    KEYS,
    EncodedFile,
    ImageError,
    ImageInputs,
    ImageSource,
    WebFile,
    array_of,
    is_absent,
)

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


class VideoInputs(ImageInputs):
    """Resolves the videos of rows; a path may be a file or a folder of frames."""

    def resolve_videos(self, value: Any, name: str) -> tuple[Video, ...]:
        """Resolves a value to videos, in order: None gives none, a list of images one, any other list several.

        Args:
            name: name of the row, for videos without a name.

        Raises:
            ImageError: a value is no video, or a path is missing or leads out of the root.
            MediaError: a web URL is not allowed or cannot be fetched.
        """
        values = each_video(value)
        names = [name] if len(values) == 1 else [f"{name}, video {number}" for number in range(1, len(values) + 1)]
        return tuple(self._video(item, item_name) for item, item_name in zip(values, names, strict=True))

    def _video(self, value: Any, name: str) -> Video:
        if isinstance(value, list | tuple):
            return self._frames(value, name)
        if isinstance(value, Mapping) and (held := [value[key] for key in FRAME_KEYS if value.get(key) is not None]):
            video, rate = self._video(held[0], name), value.get("fps")
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


def each_video(value: Any) -> list[Any]:
    """The videos of a value: None gives none, a list of images one, any other list several."""
    if is_absent(value):
        return []
    if not isinstance(value, list | tuple):
        return [value]
    given = [item for item in value if not is_absent(item)]
    return [given] if given and all(_is_frame(item) for item in given) else given


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
