"""Template digits: which number a small image shows, by comparison with rendered ones; a judge beside OCR."""

from __future__ import annotations

import io
from functools import lru_cache
from itertools import product

import numpy as np
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score

SHARES = (0.69, 0.72, 0.75)  # of the image's height: sizes of the font
SHIFTS = (-1.0, -0.5, 0.0, 0.5, 1.0)  # pixels off the centre, along both sides
MAX_DIGITS = 2  # of a number: there are 10^n templates of each size and place
MAX_SIDE = 64  # pixels: a larger image is scaled down


def template_digits(request: RewardRequest) -> Score:
    """The share of digits of the first reference that the most similar rendered number has at their places.

    Similarity is the correlation of grey levels over numbers of as many digits, of some sizes and places. It shares
    neither weights nor features with the `ocr` reward, so it shows where a policy learns to please that alone. It is no
    reader of any hand: its numbers are in the font of the task's own data. Bitmap, Hershey and DejaVu digits in their
    place read 65 to 81 of 100 digits of that data, too few to judge by.

    Raises:
        RewardError: the response has no image, or the reference is no number of one or two digits.
    """
    wanted = request.references[0] if request.references else ""
    if not (wanted.isascii() and wanted.isdigit() and len(wanted) <= MAX_DIGITS):
        raise RewardError(f"the reference {wanted!r} is no number of one or two digits")
    if not request.response.images:
        raise RewardError("the response has no image to read")
    found = [_read(image, len(wanted)) for image in request.response.images]
    shares = [sum(a == b for a, b in zip(text, wanted, strict=True)) / len(wanted) for text in found]
    return Score(sum(shares) / len(shares), f"most like {', '.join(found)}")


def _read(image: bytes, num_digits: int) -> str:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            grey = opened.convert("L")
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise RewardError(f"an image of the response cannot be opened: {error}") from error
    grey.thumbnail((MAX_SIDE, MAX_SIDE))
    texts, templates = _templates(num_digits, *grey.size)
    pixels = _normalised(np.asarray(grey, dtype=np.float32).reshape(1, -1))
    return texts[int((templates @ pixels[0]).argmax())]


@lru_cache(maxsize=8)
def _templates(num_digits: int, width: int, height: int) -> tuple[list[str], np.ndarray]:
    """Numbers, and float32 [M, pixels] of one rendering of each, normalised."""
    texts, rows = [], []
    for share, right, down in product(SHARES, SHIFTS, SHIFTS):
        font = ImageFont.load_default(share * height)
        for number in range(10**num_digits):
            image = Image.new("L", (width, height), 0)
            text, where = f"{number:0{num_digits}d}", (width / 2 + right, height / 2 + down)
            ImageDraw.Draw(image).text(where, text, fill=255, font=font, anchor="mm")
            texts.append(text)
            rows.append(np.asarray(image, dtype=np.float32).ravel())
    return texts, _normalised(np.stack(rows))


def _normalised(rows: np.ndarray) -> np.ndarray:
    """Rows of mean 0 and length 1; a row without contrast stays 0."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-6)
