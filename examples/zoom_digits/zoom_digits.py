"""Handwritten digits, each drawn small in a large picture: read by a policy that crops the picture.

images/0000.png ...                         896x896, a digit of 56x56 in the middle of a coloured quarter
train.jsonl validation.jsonl test.jsonl     question, answer, solution, demonstration: a call, then the answer
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mobula.actors.datasets.written import Rows, install_dataset

SIDE, CELLS, DIGIT = 896, 2, 56  # pixels of a picture, cells a side, pixels of a digit
SHADES = ((96, 0, 0), (0, 96, 0), (0, 0, 96), (96, 96, 0))
"""Of the quarter with the digit: one for each place, since the tiny model learns colours sooner than places."""
WHITE = 16  # the brightest value in load_digits
NUM_HELD_OUT = 300  # of validation, and of test
RELATIVE = 1000


def write_zoom_digits(folder: Path) -> Path:
    """Write the dataset into `folder`. Raises: ValueError: the folder holds something else."""
    return install_dataset(folder, {"format_version": 1, "task": "zoom_digits"}, _build)


def _build(folder: Path) -> Rows:
    pixels, labels = load_digits(return_X_y=True)  # [N, 64] in 0..16, [N]
    (folder / "images").mkdir()
    train, held_out = train_test_split(
        np.arange(len(labels)), test_size=2 * NUM_HELD_OUT, stratify=labels, random_state=0
    )
    splits = {"train": train, "validation": held_out[:NUM_HELD_OUT], "test": held_out[NUM_HELD_OUT:]}
    return {
        split: [_row(folder, int(index), pixels[index], int(labels[index])) for index in indices]
        for split, indices in splits.items()
    }


def _row(folder: Path, index: int, pixels: np.ndarray, label: int) -> dict[str, Any]:
    column, row = (Random(f"{index} {axis}").randrange(CELLS) for axis in "xy")
    cell = SIDE // CELLS
    left, top = (cell * place + (cell - DIGIT) // 2 for place in (column, row))
    ink = (pixels.reshape(8, 8) / WHITE).repeat(DIGIT // 8, 0).repeat(DIGIT // 8, 1)[..., None]  # 0 to 1
    shade = np.array(SHADES[CELLS * row + column])
    picture = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    picture[cell * row : cell * (row + 1), cell * column : cell * (column + 1)] = shade
    picture[top : top + DIGIT, left : left + DIGIT] = (shade + ink * (255 - shade)).round()
    Image.fromarray(picture).save(folder / f"images/{index:04d}.png")
    box = [round(edge * RELATIVE / SIDE) for edge in (left, top, left + DIGIT, top + DIGIT)]
    call = json.dumps({"name": "crop_image", "arguments": {"bbox_2d": box}})
    return {
        "id": f"zoom_digits-{index:04d}",
        "question": "<image>Which digit is this?",
        "answer": str(label),
        "solution": str(label),
        "demonstration": [f"<tool_call>{call}</tool_call>", str(label)],
        "image": f"images/{index:04d}.png",
    }
