"""Converts any decoded picture to RGB, identically for the policy, a reward model and a judge."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

# Only formats that are pictures and nothing else: Pillow would also run PostScript and read several plain-text formats.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
SIXTEEN_BIT_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")


def to_rgb(image: Image.Image) -> Image.Image:
    """The loaded picture as RGB: upright by its EXIF orientation, transparency on white, 16-bit grey scaled to 8.

    Raises:
        ValueError: its pixels are floating-point numbers of unknown range.
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
