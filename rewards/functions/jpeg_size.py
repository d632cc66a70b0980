"""JPEG size: how well the images of a response can be compressed, or how badly."""

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
    """value = -k / `scale` with `wanted: small`, and k / `scale` with `large`; k kilobytes as a JPEG of `quality`.

    Of several images (a video's frames) the mean counts. It needs no model and no reference, so it is cheap to try a
    flow model with. DDPO's compressibility (arXiv:2305.13301) has the quality 95, Flow-GRPO's the scale 500 as well.

    Raises:
        RewardError: the response has no image, or one cannot be opened.
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
