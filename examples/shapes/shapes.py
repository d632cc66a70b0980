"""Images of coloured shapes on a grid of 2 x 2 squares, and what they show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

COLORS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (235, 200, 30)}
SHAPES = ("circle", "square", "triangle")
SQUARE = 28  # pixels; one vision token of a model with patches of 14 that are merged by two
NUM_SQUARES = 4
BACKGROUND = (245, 245, 245)


@dataclass(frozen=True)
class Shape:
    color: str
    kind: str


Scene = tuple[Shape | None, ...]  # the four squares, row by row; None is an empty one


def random_scene(choice: Random, num_shapes: int) -> Scene:
    """A scene with `num_shapes` shapes in random squares."""
    taken = set(choice.sample(range(NUM_SQUARES), num_shapes))
    return tuple(
        Shape(choice.choice(list(COLORS)), choice.choice(SHAPES)) if place in taken else None
        for place in range(NUM_SQUARES)
    )


def count(scene: Scene, *, color: str = "", kind: str = "") -> int:
    """Shapes of this color and kind; an empty word stands for any."""
    return sum(s is not None and color in ("", s.color) and kind in ("", s.kind) for s in scene)


def draw(scene: Scene, path: Path) -> None:
    """Write the scene as a PNG of 56 x 56 pixels."""
    image = Image.new("RGB", (2 * SQUARE, 2 * SQUARE), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for place, shape in enumerate(scene):
        if shape is None:
            continue
        left, top = (place % 2) * SQUARE + 4, (place // 2) * SQUARE + 4
        right, bottom = left + SQUARE - 9, top + SQUARE - 9
        fill = COLORS[shape.color]
        if shape.kind == "circle":
            pen.ellipse((left, top, right, bottom), fill=fill)
        elif shape.kind == "square":
            pen.rectangle((left, top, right, bottom), fill=fill)
        else:
            pen.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=fill)
    image.save(path)
