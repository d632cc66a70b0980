"""Short videos of handwritten digits, each of which asks for the digit that is shown longest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

NUM_FRAMES = 8
FRAME_MS = 250
LENGTHS = ((6, 2), (4, 2, 2))  # frames of each digit of a clip, those of the longest first
SIZE, UPSCALE = 28, 3  # of a frame, and of a digit's 8x8 pixels in it
CENTRE, DRIFT = (SIZE - 8 * UPSCALE) // 2, 1  # where a digit begins, and how far it moves from there, in pixels
WHITE = 16  # the brightest value in load_digits


def write_clip(
    path: Path, index: int, others: Sequence[int], pixels: np.ndarray, labels: np.ndarray, random: Random
) -> None:
    """Write a GIF in which the digit `index` is shown longest, among one or two of `others` that look otherwise.

    Every digit is shown once, and moves a little from frame to frame. `pixels` [N, 64] are in 0..16.
    """
    lengths = random.choice(LENGTHS)
    shown = [index, *_distinct(index, others, labels, len(lengths) - 1, random)]
    parts = list(zip(shown, lengths, strict=True))
    random.shuffle(parts)
    frames = [frame for digit, length in parts for frame in _moving(pixels[digit], length, random)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)


def _distinct(index: int, others: Sequence[int], labels: np.ndarray, num: int, random: Random) -> list[int]:
    """`num` of `others`, each of another digit than `index` and than each other."""
    found: dict[int, int] = {}
    while len(found) < num:
        other = random.choice(others)
        if labels[other] != labels[index]:
            found.setdefault(int(labels[other]), other)
    return list(found.values())


def _moving(digit: np.ndarray, num: int, random: Random) -> list[Image.Image]:
    """`num` grey frames of a digit, no two in a row alike: a GIF would make one frame of them."""
    grey = (digit.reshape(8, 8) * 255 / WHITE).round().astype(np.uint8)
    large = grey.repeat(UPSCALE, axis=0).repeat(UPSCALE, axis=1)
    steps = [(across, down) for across in (-1, 0, 1) for down in (-1, 0, 1) if across or down]
    across = down = 0
    frames = []
    for _ in range(num):
        frame = np.zeros((SIZE, SIZE), dtype=np.uint8)
        left, top = CENTRE + across, CENTRE + down
        frame[top : top + large.shape[0], left : left + large.shape[1]] = large
        frames.append(Image.fromarray(frame))
        near = [(across + a, down + d) for a, d in steps if max(abs(across + a), abs(down + d)) <= DRIFT]
        across, down = random.choice(near)
    return frames
