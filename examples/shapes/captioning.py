"""Images of coloured shapes to describe, with the keywords that a description has to hold.

    images/train-0000.png ...
    train.jsonl validation.jsonl test.jsonl     question, solution (a description), metadata.keywords, one image

Own images are read with `data=jsonl`: rows of the same columns.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from mobula.actors.datasets.written import Rows, install_dataset
from mobula.examples.shapes.shapes import Scene, draw, random_scene

QUESTION = "<image>Describe the image in one sentence."
NUM_ROWS = {"train": 1000, "validation": 100, "test": 200}
NUMBERS = ("a", "two", "three")


def write_captioning(folder: Path, *, seed: int = 0) -> Path:
    """Write the dataset into `folder`.

    Raises:
        ValueError: the folder holds something else.
    """
    marker = {"format_version": 1, "task": "captioning", "seed": seed}
    return install_dataset(folder, marker, lambda to: _build(to, seed))


def _build(folder: Path, seed: int) -> Rows:
    (folder / "images").mkdir()
    return {split: [_row(folder, split, n, seed) for n in range(num)] for split, num in NUM_ROWS.items()}


def _row(folder: Path, split: str, number: int, seed: int) -> dict[str, Any]:
    choice = Random(f"{seed} {split} {number}")
    scene = random_scene(choice, choice.randint(1, 3))
    name = f"images/{split}-{number:04d}.png"
    draw(scene, folder / name)
    caption = describe(scene)
    return {
        "id": f"caption-{split}-{number:04d}",
        "question": QUESTION,
        "answer": caption,
        "solution": caption,
        "image": name,
        "metadata": {"keywords": keywords_of(caption)},
    }


def describe(scene: Scene) -> str:
    """A description of a scene, in the order of its squares.

    Example:
        >>> describe((Shape("red", "circle"), None, Shape("red", "circle"), Shape("blue", "square")))
        'Two red circles and a blue square.'
    """
    groups = Counter((shape.color, shape.kind) for shape in scene if shape is not None)
    parts = [f"{NUMBERS[n - 1]} {color} {kind}{'s' * (n > 1)}" for (color, kind), n in groups.items()]
    text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return f"{text[0].upper()}{text[1:]}."


def keywords_of(caption: str) -> list[str]:
    """The words of a caption that say something, each once."""
    words = caption.lower().replace(",", " ").rstrip(".").split()
    return list(dict.fromkeys(word for word in words if word not in ("a", "and")))
