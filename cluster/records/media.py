"""Media of a prompt, stored once under a content hash."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import unpack
from typing import IO, Any, Protocol

import numpy as np
from PIL import Image, ImageOps
from PIL.ExifTags import Base
from PIL.PngImagePlugin import PngImageFile

from mobula.cluster.runtime.object_store import fetch, fetch_at_hand

IMAGE_SIZES = "image_sizes"  # [width, height] of each image file of the prompt, upright


# [width, height] of each image after the model's processor, for model families with coordinates in these pixels
SHOWN_SIZES = "shown_image_sizes"


# Only pure image formats: Pillow would also run PostScript and read several plain-text formats.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
SIXTEEN_BIT_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")
ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
PNG_METADATA = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # chunks that may hold an orientation


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Returns (width, height) of `to_rgb(image)` for an opened image that is not loaded. Pixels are decoded only for a
    PNG file with metadata after its pixels."""
    width, height = image.size
    tags = getattr(image, "tag_v2", {})  # TIFF: Pillow has already swapped the size by this tag
    if tags.get(Base.Orientation) in ON_ITS_SIDE:
        return width, height
    if isinstance(image, PngImageFile) and "exif" not in image.info:
        assert image.fp is not None, "the image was loaded"
        if _has_metadata_behind_pixels(image.fp):
            image.load()
    # Pillow's method for PNG would decode the pixels in any case.
    orientation = Image.Image.getexif(image).get(Base.Orientation)
    return (height, width) if orientation in ON_ITS_SIDE else (width, height)


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts a loaded image to RGB: upright by its EXIF orientation, transparency on white, 16-bit grey scaled to
    8."""
    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BIT_MODES:  # Pillow's own conversion would clip at 255
        grey = np.asarray(image).clip(0, 0xFFFF) // 257  # [H, W]
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range; save it with 8 or 16 bits a channel")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _has_metadata_behind_pixels(png: IO[bytes]) -> bool:
    """Whether the file has metadata after its first chunk of pixels, where several tools write EXIF."""
    position, is_behind, has_metadata = png.tell(), False, False
    png.seek(8)  # the signature
    while not has_metadata and len(head := png.read(8)) == 8:
        length, kind = unpack(">I4s", head)
        is_behind |= kind == b"IDAT"
        has_metadata = is_behind and kind in PNG_METADATA
        png.seek(length + 4, 1)
    png.seek(position)
    return has_metadata


# Content-addressed media: one object-store copy per image, shared by all siblings and roles.
#
# An image is decoded, checked and processed once. The processed tensors (arguments of the model's `forward()`) are
# stored under a key of the file's content and the processor's settings; prompts carry the key and a reference.


@dataclass(frozen=True)
class ProcessedMedia:
    """One image or video as model inputs: forward() argument name -> array, e.g. `pixel_values` and `image_grid_thw`.

    `thumbnail` is the image (of a video, the first frame) as a small PNG, for reports. `files` holds the original
    image, or the sampled frames as PNG, if a reward function needs them.
    """

    modality: str
    inputs: dict[str, np.ndarray]
    thumbnail: bytes = b""
    files: tuple[bytes, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values()) + len(self.thumbnail) + sum(map(len, self.files))


@dataclass(frozen=True)
class MediaSpan:
    """Position of one expanded medium in expanded ids: the half-open interval [start, end). In some families it
    contains other tokens, too; only tokens with the placeholder id are replaced by embeddings."""

    start: int
    end: int


@dataclass(frozen=True)
class MediaHandle:
    """A reference to one stored medium; equal keys mean equal tensors."""

    key: str
    modality: str
    num_bytes: int
    reference: Any = field(compare=False, repr=False)
    source: str = field(default="", compare=False)  # origin, for reports and error messages


def content_key(content: bytes, processor_fingerprint: str) -> str:
    """Returns the key of a medium: sha256 over the processor's settings and the file's bytes."""
    return hashlib.sha256(processor_fingerprint.encode() + b"\0" + content).hexdigest()


class MediaKeeper(Protocol):
    """Stores media for processors."""

    def get_or_add(self, key: str, source: str, process: Callable[[], ProcessedMedia]) -> MediaHandle:
        """Returns the handle stored under `key`; calls `process` if there is none."""


class MediaStore:
    """Stores each medium once. The least recently used media are dropped when the byte budget is exceeded.

    A dropped medium exists as long as a prompt refers to it (the object store counts references), and is processed
    again at the next request.
    """

    def __init__(self, put: Callable[[Any], Any], max_bytes: int) -> None:
        self._put = put
        self._max_bytes = max_bytes
        self._handles: OrderedDict[str, MediaHandle] = OrderedDict()
        self._lock = threading.Lock()  # several threads prepare prompts: prefetching and regeneration
        self.num_bytes = 0
        self.num_bytes_unique = 0  # of all media ever stored

    def get_or_add(self, key: str, source: str, process: Callable[[], ProcessedMedia]) -> MediaHandle:
        with self._lock:
            handle = self._handles.get(key)
            if handle is None:
                media = process()
                handle = self._add(MediaHandle(key, media.modality, media.num_bytes, self._put(media), source))
            self._handles.move_to_end(key)
            return handle

    def find(self, key: str) -> MediaHandle | None:
        with self._lock:
            return self._handles.get(key)

    def keep(self, handle: MediaHandle) -> MediaHandle:
        """Stores a medium of another process. Returns the handle of the key, which may be an earlier handle."""
        with self._lock:
            kept = self._handles.get(handle.key) or self._add(handle)
            self._handles.move_to_end(handle.key)
            return kept

    def _add(self, handle: MediaHandle) -> MediaHandle:
        self._handles[handle.key] = handle
        self.num_bytes += handle.num_bytes
        self.num_bytes_unique += handle.num_bytes
        while self.num_bytes > self._max_bytes and len(self._handles) > 1:
            _, evicted = self._handles.popitem(last=False)
            self.num_bytes -= evicted.num_bytes
        return handle


class MediaReader:
    """Resolves handles to tensors, with a cache in this process, so that siblings share one copy. Several threads may
    read at a time; a thread still gets a medium that another thread evicts."""

    def __init__(self, *, timeout_s: float, max_items: int) -> None:
        self._timeout_s = timeout_s
        self._max_items = max_items
        self._items: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]:
        """Returns the media of `handles`, in order; each missing medium is fetched once."""
        by_key, missing = self._kept(handles)
        sources = ", ".join(h.source for h in missing)
        fetched = fetch([h.reference for h in missing], timeout_s=self._timeout_s, what=f"media {sources}")
        by_key |= {h.key: media for h, media in zip(missing, fetched, strict=True)}
        self._keep(by_key)
        return [by_key[h.key] for h in handles]

    def read_at_hand(self, wanted: Sequence[Sequence[MediaHandle]]) -> list[list[ProcessedMedia] | None]:
        """Like `read`, for several readers at once. Returns None for a reader whose media are not all on this node."""
        by_key, missing = self._kept([handle for handles in wanted for handle in handles])
        fetched = fetch_at_hand([[h.reference] for h in missing], wait_s=0.0)
        by_key |= {h.key: media[0] for h, media in zip(missing, fetched, strict=True) if media is not None}
        self._keep(by_key)
        return [[by_key[h.key] for h in own] if all(h.key in by_key for h in own) else None for own in wanted]

    def _kept(self, handles: Sequence[MediaHandle]) -> tuple[dict[str, ProcessedMedia], list[MediaHandle]]:
        """Returns the cached media of `handles` by key, and the handles of the others without duplicates."""
        with self._lock:
            cached = {h.key: self._items[h.key] for h in handles if h.key in self._items}
        return cached, list({h.key: h for h in handles if h.key not in cached}.values())

    def _keep(self, media: Mapping[str, ProcessedMedia]) -> None:
        with self._lock:
            for key, medium in media.items():
                self._items[key] = medium
                self._items.move_to_end(key)
            while len(self._items) > self._max_items:
                self._items.popitem(last=False)
