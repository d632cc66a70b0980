"""JPEG size as a reward: flat images are small, noise is large."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import RewardRequest, evaluate
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

TOOLS = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")
FLAT = Image.new("RGB", (64, 64), (40, 90, 160))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def request(*images: Image.Image) -> RewardRequest:
    files = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    return RewardRequest(Response("", 1, False, tuple(files)), (), {}, "")


def kilobytes(image: Image.Image, quality: int) -> float:
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=quality)
    return len(file.getvalue()) / 1000


def test_it_is_the_size_of_the_file_and_frames_count_by_their_mean() -> None:
    small = build_function("jpeg_size", {"wanted": "small", "quality": 95, "scale": 500.0}, TOOLS)
    large = build_function("jpeg_size", {"wanted": "large", "quality": 50, "scale": 1.0}, TOOLS)
    assert evaluate(small, request(NOISE)).value == pytest.approx(-kilobytes(NOISE, 95) / 500)
    assert evaluate(large, request(NOISE)).value == pytest.approx(kilobytes(NOISE, 50))
    both = (kilobytes(FLAT, 50) + kilobytes(NOISE, 50)) / 2
    assert evaluate(large, request(FLAT, NOISE)).value == pytest.approx(both)
    assert evaluate(small, request(FLAT)).value > 4 * evaluate(small, request(NOISE)).value


def test_a_response_without_an_image_or_with_a_damaged_one_has_no_reward() -> None:
    small = build_function("jpeg_size", {"wanted": "small", "quality": 95, "scale": 500.0}, TOOLS)
    with pytest.raises(RewardError, match="no image to compress"):
        evaluate(small, request())
    with pytest.raises(RewardError, match="image 1 of the response"):
        evaluate(small, RewardRequest(Response("", 1, False, (b"\x89PNG",)), (), {}, ""))
