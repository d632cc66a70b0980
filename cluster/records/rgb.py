"""Converts any decoded image to RGB, in the same way for policy, reward models and judges."""

from __future__ import annotations

from struct import unpack
from typing import IO

import numpy as np
from PIL import Image, ImageOps
from PIL.ExifTags import Base
from PIL.PngImagePlugin import PngImageFile

# Only pure image formats: Pillow would also run PostScript and read several plain-text formats.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
SIXTEEN_BIT_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")
ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
PNG_METADATA = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # chunks that may hold an orientation


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Returns (width, height) of `to_rgb(image)` for an opened image that is not loaded. Pixels are decoded only for a
    PNG file with metadata after its pixels.

    Raises:
        Exception: the metadata are damaged. Nearly any type is possible.
    """
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
    """Converts a loaded image to RGB: upright by its EXIF orientation, transparency on white, 16-bit grey scaled to 8.

    Raises:
        ValueError: the pixels are floating-point numbers of unknown range.
    """
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
