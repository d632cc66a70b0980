"""Images and texts of a request as a scorer reads them."""

from __future__ import annotations

import base64
import re
from io import BytesIO

from PIL import Image

from mobula.cluster.errors import RewardError
from mobula.cluster.records.media import FORMATS, to_rgb

# Markers such as <|im_end|> are removed anywhere; shorter ones may be HTML tags and are removed at the ends only.
_MARKERS = re.compile(
    r"<\|[^|<>\s]{1,64}\|>|<\uff5c[^\uff5c<>]{1,64}\uff5c>|<(?:start_of_turn|end_of_turn|image|IMG_CONTEXT)>"
)
_EDGES = re.compile(r"^(?:\s*<(?:/?s|bos|eos|pad|unk)>)+|(?:<(?:/?s|bos|eos|pad|unk)>\s*)+$")


def without_markers(text: str) -> str:
    """Returns `text` without special tokens, and without leading white space from padding."""
    return _EDGES.sub("", _MARKERS.sub("", text)).lstrip()


MAX_PIXELS = 100_000_000  # 300 MB when decoded; a larger image is refused before a pixel is read
_ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
_MEDIA_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png"}


def decode_image(content: bytes, what: str) -> Image.Image:
    """Decodes an image to RGB. `what` names it in errors, e.g. "image 2 of the prompt"."""
    try:
        with _open(content, what) as image:
            image.load()
            return to_rgb(image)
    except RewardError:
        raise
    except Exception as error:  # decoders of damaged files raise errors of nearly any type
        raise RewardError(f"{what} is damaged ({error})") from error


def portable_image(content: bytes, what: str) -> tuple[str, bytes]:
    """Returns (media type, file). An upright RGB or grey JPEG or PNG is unchanged; others become a PNG of equal
    pixels."""
    with _open(content, what) as image:
        is_plain = image.mode in ("RGB", "L") and not image.has_transparency_data
        if is_plain and image.format in _MEDIA_TYPES and image.getexif().get(_ORIENTATION, 1) == 1:
            return _MEDIA_TYPES[image.format], content
    buffer = BytesIO()  # one for each image
    decode_image(content, what).save(buffer, format="PNG")
    return _MEDIA_TYPES["PNG"], buffer.getvalue()


def data_url(content: bytes, what: str) -> str:
    """Encodes an image as a data URL, for chat services."""
    media_type, file = portable_image(content, what)
    return f"data:{media_type};base64,{base64.b64encode(file).decode('ascii')}"


def _open(content: bytes, what: str) -> Image.Image:
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except Exception as error:  # a damaged header raises errors of nearly any type
        raise RewardError(f"{what} is no {', '.join(FORMATS)} image ({len(content)} bytes)") from error
    if not 0 < image.width * image.height <= MAX_PIXELS:
        raise RewardError(f"{what} decodes to {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
    return image
