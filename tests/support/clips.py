"""Video files of smooth noise, made with PyAV."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image


def noise_frames(num: int, size: tuple[int, int] = (70, 50), seed: int = 0) -> list[Image.Image]:
    """`num` images of (width, height), no two alike."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (num, height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return [Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in pixels]


def write_clip(
    path: Path, frames: list[Image.Image], *, rate: int = 4, codec: str = "ffv1", movflags: str | None = None
) -> Path:
    """The frames as a video file; `ffv1` (in .mkv) loses nothing but by the conversion of colours."""
    options = {} if movflags is None else {"movflags": movflags}
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, rate)
        for number, frame in enumerate(frames):
            shown = av.VideoFrame.from_image(frame)
            shown.pts = number
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
    return path
