"""JPEG size: rewards generated images for small or for large files."""

from __future__ import annotations

from io import BytesIO
from typing import Literal

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.references import check_number
from mobula.rewards.images import decode_image
from mobula.rewards.tools import Tools

BYTES = 1000  # of a kilobyte


class JpegSize:
    """value = -k / `scale` with `wanted: small`, k / `scale` with `large`; k is the size in kB as a JPEG of `quality`.

    Several images (frames of a video) give the mean. Needs no model and no reference, which makes it a cheap test of a
    flow model. DDPO's compressibility (arXiv:2305.13301) uses quality 95; Flow-GRPO also divides by 500.
    """

    def __init__(self, tools: Tools, *, wanted: Literal["small", "large"], quality: int, scale: float) -> None:
        if wanted not in ("small", "large"):
            raise ValueError(f"wanted={wanted!r} is unknown: use small or large")
        if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 95:
            raise ValueError(f"quality={quality!r} is unfit: give a whole number from 1 to 95")
        check_number("scale", scale, low=0)
        if scale == 0:
            raise ValueError("scale=0 divides by nothing: give a number above 0")
        self._per_kilobyte = (1 if wanted == "large" else -1) / scale
        self._quality = quality

    def __call__(self, request: RewardRequest) -> Score:
        images = request.response.images
        if not images:
            raise RewardError("the response has no image to compress")
        sizes = [self._size(image, f"image {n + 1} of the response") for n, image in enumerate(images)]
        kilobytes = sum(sizes) / len(sizes)
        return Score(self._per_kilobyte * kilobytes, f"{kilobytes:.1f} kB as JPEG")

    def _size(self, image: bytes, what: str) -> float:
        file = BytesIO()
        decode_image(image, what).save(file, "JPEG", quality=self._quality)
        return file.tell() / BYTES
