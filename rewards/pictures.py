"""Encoded picture files for reward models and services: decoded to RGB, or as a file that any library reads."""

from __future__ import annotations

import base64
from io import BytesIO

from PIL import Image

from mobula.cluster.errors import RewardError
from mobula.cluster.records.rgb import FORMATS, to_rgb

MAX_PIXELS = 100_000_000  # 300 MB once decoded; a file that claims more is refused before a pixel is read
_ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
_MEDIA_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png"}


def decode_picture(content: bytes, what: str) -> Image.Image:
    """The picture as RGB; `what` names it in errors, e.g. "picture 2 of the prompt".

    Raises:
        RewardError: it is no picture, is damaged, or decodes to more than `MAX_PIXELS`.
    """
    try:
        with _open(content, what) as image:
            image.load()
            return to_rgb(image)
    except RewardError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly everything
        raise RewardError(f"{what} is damaged ({error})") from error


def portable_picture(content: bytes, what: str) -> tuple[str, bytes]:
    """(media type, file) of an upright RGB or grey JPEG or PNG: unchanged if it is one, else a PNG of the same pixels.

    Raises:
        RewardError: as `decode_picture`.
    """
    with _open(content, what) as image:
        is_plain = image.mode in ("RGB", "L") and not image.has_transparency_data
        if is_plain and image.format in _MEDIA_TYPES and image.getexif().get(_ORIENTATION, 1) == 1:
            return _MEDIA_TYPES[image.format], content
    buffer = BytesIO()  # one for each picture
    decode_picture(content, what).save(buffer, format="PNG")
    return _MEDIA_TYPES["PNG"], buffer.getvalue()


def data_url(content: bytes, what: str) -> str:
    """The picture inside a URL, as chat services take it.

    Raises:
        RewardError: as `decode_picture`.
    """
    media_type, file = portable_picture(content, what)
    return f"data:{media_type};base64,{base64.b64encode(file).decode('ascii')}"


def _open(content: bytes, what: str) -> Image.Image:
    """Read the header; no pixel is decoded yet."""
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except Exception as error:  # a damaged header raises nearly everything
        raise RewardError(f"{what} is no {', '.join(FORMATS)} picture ({len(content)} bytes)") from error
    if not 0 < image.width * image.height <= MAX_PIXELS:
        raise RewardError(f"{what} decodes to {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
    return image
