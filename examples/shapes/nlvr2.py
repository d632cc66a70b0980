"""Statements about two rendered images that are true or false, in the form of NLVR2 (Suhr et al., 2019).

    images/train-0000-left.png images/train-0000-right.png ...
    train.jsonl validation.jsonl test.jsonl     question, answer "True" or "False", two images

The real NLVR2 is read with `data=jsonl`: rows of the same columns with its statements and photographs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from mobula.actors.datasets.written import Rows, install_dataset
from mobula.examples.shapes.shapes import COLORS, SHAPES, Scene, count, draw, random_scene

QUESTION = "<image><image>Look at the two images. {statement} Answer True or False."
NUM_ROWS = {"train": 1200, "validation": 120, "test": 200}
MAX_SHAPES = 3  # of one image

Claim = tuple[str, Callable[[Scene, Scene], bool]]


def write_nlvr2(folder: Path, *, seed: int = 0) -> Path:
    """Write the dataset into `folder`. In every split and for every kind of statement half of the rows are true.

    Raises:
        ValueError: the folder holds something else.
    """
    return install_dataset(folder, {"format_version": 1, "task": "nlvr2", "seed": seed}, lambda to: _build(to, seed))


def _build(folder: Path, seed: int) -> Rows:
    (folder / "images").mkdir()
    return {split: [_row(folder, split, n, seed) for n in range(num)] for split, num in NUM_ROWS.items()}


def _row(folder: Path, split: str, number: int, seed: int) -> dict[str, Any]:
    choice = Random(f"{seed} {split} {number}")
    statement, holds = CLAIMS[number // 2 % len(CLAIMS)](choice)
    wanted = number % 2 == 0
    left, right = _scenes(choice)
    while holds(left, right) is not wanted:
        left, right = _scenes(choice)
    names = [f"images/{split}-{number:04d}-{side}.png" for side in ("left", "right")]
    for scene, name in zip((left, right), names, strict=True):
        draw(scene, folder / name)
    return {
        "id": f"nlvr2-{split}-{number:04d}",
        "question": QUESTION.format(statement=statement),
        "answer": str(wanted),
        "solution": str(wanted),
        "image": names,
    }


def _scenes(choice: Random) -> tuple[Scene, Scene]:
    return random_scene(choice, choice.randint(1, MAX_SHAPES)), random_scene(choice, choice.randint(1, MAX_SHAPES))


def _has_color(choice: Random) -> Claim:
    color, side = choice.choice(list(COLORS)), choice.randrange(2)
    name = ("left", "right")[side]
    return f"The {name} image contains a {color} shape.", lambda *scenes: count(scenes[side], color=color) > 0


def _both_have(choice: Random) -> Claim:
    kind = choice.choice(SHAPES)
    return f"Both images contain a {kind}.", lambda *scenes: all(count(scene, kind=kind) for scene in scenes)


def _more(choice: Random) -> Claim:
    return (
        "The left image has more shapes than the right image.",
        lambda left, right: count(left) > count(right),
    )


def _total(choice: Random) -> Claim:
    kind, number = choice.choice(SHAPES), choice.randint(1, 3)
    words = f"is exactly one {kind}" if number == 1 else f"are exactly {('two', 'three')[number - 2]} {kind}s"
    return f"There {words} in the two images.", lambda *scenes: sum(count(s, kind=kind) for s in scenes) == number


CLAIMS: tuple[Callable[[Random], Claim], ...] = (_has_color, _both_have, _more, _total)
